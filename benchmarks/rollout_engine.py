"""vLLM on this machine's CPU: every pass of generations whose lengths are given.

python benchmarks/rollout_engine.py TASK.json ANSWER.json

A task names the model, the engine's limits, and lists of requests. The answer has, for each list,
the CPU seconds of every pass, and of a fixed computation before it: how fast the core was at that
moment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    task = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    limits = task["engine"]
    blocks = (
        {} if limits["blocks"] is None else {"num_gpu_blocks_override": limits["blocks"] + 1}
    )  # one is the null block
    llm = LLM(
        model=task["model"],
        enforce_eager=True,
        dtype="float32",
        max_model_len=task["longest"],
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_batched_tokens"],
        block_size=limits["block_tokens"],
        seed=0,
        **blocks,
    )
    engine = llm.llm_engine
    answers = []
    for run, requests in enumerate(task["runs"]):
        answers.append(generate(engine, SamplingParams, requests, task["vocabulary"], run))
    import vllm

    Path(sys.argv[2]).write_text(
        json.dumps({"versions": {"vllm": vllm.__version__}, "runs": answers})
    )
    return 0


def generate(
    engine: Any,
    parameters: Any,
    requests: list[dict[str, int]],
    vocabulary: int,
    run: int,
) -> list[list[float]]:
    """Return the CPU seconds of each pass and of the fixed computation before it.

    Prompts of a group are equal; no two runs share one.
    """
    for number, request in enumerate(requests):
        first = 1000 * run + 7 * request["group"]
        prompt = []
        for place in range(request["prompt"]):
            prompt.append(
                3
                + (first * 31 + place * 17 + place * place * (request["group"] + run + 1))
                % (vocabulary - 3)
            )
        sampling = parameters(
            temperature=1.0,
            max_tokens=request["completion"],
            ignore_eos=True,
            detokenize=False,
            seed=None,
        )
        engine.add_request(f"{run}-{number}", {"prompt_token_ids": prompt}, sampling)
    passes = []
    while engine.has_unfinished_requests():
        began = time.process_time()
        fixed_computation()
        before = time.process_time()
        engine.step()
        passes.append([time.process_time() - before, before - began])
    return passes


def fixed_computation() -> int:
    """Half a millisecond of an interpreter's work."""
    counts: dict[int, int] = {}
    for number in range(4000):
        counts[number % 97] = counts.get(number % 89, 0) + number
    return len(counts)


if __name__ == "__main__":
    raise SystemExit(main())
