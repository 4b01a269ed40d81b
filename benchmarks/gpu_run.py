"""`autotune run` on the GPU of this machine, under several memory limits: real CUDA out-of-memory errors, named.

A made-up Qwen2.5-0.5B (the catalogue's shape, random weights) needs no download. One JSON file holds
every measurement of every limit, with the GPU, versions and date.

    python benchmarks/gpu_run.py --limits 8G,16G,40G
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import facts

FLAGS = ("--gpus", "local", "--hold", "use_vllm=false", "--hold", "max_prompt_length=256", "--hold", "max_completion_length=512")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--limits", default="8G,16G,40G")
    parser.add_argument("--budget", default="3m", help="of each limit")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_run.json"))
    arguments = parser.parse_args()
    answers = {limit: _run(arguments.model, limit, arguments.budget) for limit in arguments.limits.split(",")}
    versions = next((answer["versions"] for answer in answers.values() if answer.get("versions")), {})
    result = {"machine": {**facts(versions), "gpu": _gpu()}, "model": arguments.model, "flags": list(FLAGS), "answers": answers}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"gpu": _gpu(), "written": str(arguments.out)}))


def _run(model: str, limit: str, budget: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder:
        command = [sys.executable, "-m", "autotune", "run", "--model", model, *FLAGS, "--memory-limit", limit]
        command += ["--budget", budget, "--out", f"{folder}/out", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    answer: dict[str, Any] = json.loads(done.stdout)
    return {"exit": done.returncode, **answer}


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
