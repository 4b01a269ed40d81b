"""TRL's asynchronous GRPO: rows, rules, requests and files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.job import Model, Task
from autotune.core.measurement import ProbePlan
from autotune.core.units import GIB
from autotune.frameworks import trainer
from autotune.frameworks.trl.packed_rows import PackedRow, fullest_row
from tests.frameworks.conftest import make_task

ASYNC: Any = trainer("trl", "async-grpo")
SHAPE = {
    "max_position_embeddings": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LENGTHS = {"max_prompt_length": 512, "max_completion_length": 1024}


def task(
    gpus: int = 4, *, card: str = "H100", config: dict[str, Any] | None = None, **workload: Any
) -> Task:
    model = Model(
        name="made/up",
        config={**SHAPE, **(config or {})},
        folder=None,
        origin="catalogue",
    )
    settings_held = {**LENGTHS, **workload.pop("held_values", {})}
    base_task = make_task(
        gpus,
        kind="cuda",
        method="async-grpo",
        **{"model": model, "held_values": settings_held, **workload},
    )
    return replace(
        base_task,
        hardware=replace(
            base_task.hardware,
            name=card,
            memory_bytes=80 * GIB,
            here=False,
        ),
    )


def refusal(job_task: Task, **knobs: Any) -> str | None:
    why: str | None = ASYNC.why_illegal(ASYNC.complete(knobs, job_task), job_task)
    return why


# Rows.


def test_a_row_is_filled_up_to_its_budget() -> None:
    settings = {**LENGTHS, "num_generations": 8}
    assert fullest_row({**settings, "token_budget": None}, 3) == PackedRow(
        rollouts=1,
        groups=1,
        completion=1024,
    )
    full = fullest_row({**settings, "token_budget": 8192}, 3)
    assert (full.rollouts, full.groups) == (8, 1), "their prompt is there once"
    assert 8192 - 8 < 512 + 8 * full.completion + 7 <= 8192
    beyond = fullest_row({**settings, "token_budget": 16384}, 3)
    assert (beyond.rollouts, beyond.groups) == (15, 2), "a second prompt for the second group"


def test_a_counted_micro_batch_is_not_divided_evenly() -> None:
    settings = {**LENGTHS, "num_generations": 8, "token_budget": 0}
    assert fullest_row({**settings, "per_device_train_batch_size": 4}, 2) == PackedRow(
        rollouts=4,
        groups=1,
        completion=1024,
    )
    # 24 rollouts of three groups on two ranks: two groups on one of them.
    assert fullest_row({**settings, "per_device_train_batch_size": 12}, 2).rollouts == 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_row_of_trls_own_planners_is_fuller(seed: int) -> None:
    """Random settings: rows at the longest lengths, and of any lengths under a budget, have at
    most as many tokens.
    """
    pytest.importorskip("trl")
    import itertools

    from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher, TokenBudgetBatcher

    from autotune.worker.trl import async_grpo_method

    draw = random.Random(seed)
    prompt, completion, group, ranks = (
        draw.randint(3, 20),
        draw.randint(5, 40),
        draw.randint(2, 9),
        draw.randint(1, 4),
    )
    micro_batch = draw.randint(1, 12)
    budget = 0 if seed % 2 else draw.randint(prompt + completion, 5 * (prompt + completion))
    settings = {
        "max_prompt_length": prompt,
        "max_completion_length": completion,
        "num_generations": group,
        "per_device_train_batch_size": micro_batch,
        "token_budget": budget,
    }
    predicted = fullest_row(settings, ranks)
    tokens = (
        predicted.groups * prompt
        + predicted.rollouts * predicted.completion
        + predicted.rollouts
        - predicted.groups
    )

    def fullest(shortest: int) -> int:
        def lengths() -> tuple[int, int]:
            return prompt, draw.randint(shortest, completion)

        rollouts = async_grpo_method.rollouts(lengths, lambda number: number // group)
        names = ("input_ids", "completion_mask", "group_id")
        source = (
            {name: getattr(rollout, name) for name in names}
            for rollout in itertools.islice(rollouts, 1000)
        )
        planner: Any = (
            TokenBudgetBatcher(source, ranks, budget, {"batch/dropped_oversize_total": []})
            if budget
            else FixedCountBatcher(source, ranks, micro_batch * ranks)
        )
        return max(len(row.tokens) for rows in planner for row in rows)

    longest = fullest(completion)
    assert longest <= tokens
    if budget:
        assert fullest(1) <= budget and tokens >= budget - predicted.rollouts
    else:
        assert longest == tokens


def test_a_trace_counts_the_rollouts_of_the_fullest_row() -> None:
    job_task = task(3, held_values={"token_budget": 16384, "gradient_accumulation_steps": 2})
    candidate = ASYNC.complete({}, job_task)
    request = json.loads(json.dumps(ASYNC.trace_request(candidate, job_task)))
    step = request["settings"]
    assert (step["per_device_train_batch_size"], step["token_budget"], request["groups"]) == (
        15,
        0,
        2,
    )
    assert not {"max_inflight_tasks", "max_staleness", "sharding", "use_vllm"} & set(step)
    assert request["sharding"] == {
        "kind": "ddp",
        "ranks": 2,
        "options": {"find_unused_parameters": False},
    }
    assert request["model"]["dtype"] == "float32"
    composition = ASYNC.compose(candidate, job_task)
    assert (composition.ranks, composition.micro_batch, composition.generation_batch) == (2, 15, 60)
    assert composition.completion_length == request["lengths"]["completion"]
    assert [resident.role for resident in composition.residents] == ["policy"], (
        "no reference, and no engine on these GPUs"
    )


def test_the_server_has_its_own_gpus_and_is_ahead_within_staleness() -> None:
    job_task = task(
        8,
        held_values={"server_gpus": 4, "server_tensor_parallel_size": 2, "max_staleness": 2},
        global_batch=48,
    )
    candidate = ASYNC.complete({}, job_task)
    assert (
        candidate.settings["gradient_accumulation_steps"] == 12
        and ASYNC.why_illegal(candidate, job_task) is None
    )
    split = ASYNC.compose(candidate, job_task).split
    assert (split.gpus, split.engines, split.overlap, split.at_sync) == (4, 2, "stream", "pause")
    assert (
        split.batches_ahead == 2 and split.in_flight == 2 * 8 * 12 * 4
    )  # TRL's default, from the batch size it does not use
    assert split.engine.max_model_length == 1536
    fewer = ASYNC.compose(ASYNC.complete({"max_inflight_tasks": 64}, job_task), job_task).split
    assert fewer.in_flight == 64


# Rules.


@pytest.mark.parametrize(
    ("job_task", "message"),
    [
        (task(4), None),
        (task(4, card="A100-80G"), None),
        (task(4, card="B200"), "compute capability 8 and 9; B200 has 10.0"),
        (task(4, card="T4"), "T4 has 7.5"),
        (task(1), "at least 2 GPUs"),
        (task(4, held_values={"server_gpus": 4}), "leaves none of the 4 GPUs"),
        (task(4, held_values={"sharding": "zero3"}), "ddp and fsdp2 only"),
        (task(2, held_values={"sharding": "fsdp2"}), "over the GPUs that train, and there is one"),
        (task(4, held_values={"bf16": False}), "bf16 must be on"),
        (task(4, held_values={"bf16": False, "dtype": "bfloat16"}), None),
        (
            task(4, held_values={"token_budget": 1024}),
            "at least longest prompt + longest completion (1536)",
        ),
        (task(4, held_values={"token_budget": 0}), None),
        (task(4, held_values={"max_inflight_tasks": 0}), "leaves the trainer without rollouts"),
        (task(4, held_values={"use_liger_kernel": True}), "refuses use_liger_kernel"),
        (
            task(4, held_values={"weight_sync_steps": 0}),
            "weight_sync_steps must be a whole number of at least 1",
        ),
        (task(4, tuning="qlora"), "quantised weights"),
        (
            task(4, tuning="lora", held_values={"lora_target_modules": "lm_head"}),
            "refuses an adapter on lm_head",
        ),
        (
            task(4, config={"layer_types": ["linear_attention", "full_attention"]}),
            "recurrent layers",
        ),
        (task(4, config={"model_type": "gpt_oss"}), "attention sinks"),
        (task(4, config={"kv_lora_rank": 512}), "MLA"),
        (task(4, config={"head_dim": 512}), "heads of at most 256"),
        (task(4, held_values={"max_completion_length": 4096}), "exceed the model's 4096 positions"),
        (task(4, held_values={"token_budget": 0}, global_batch=7), "is held at 7"),
    ],
)
def test_rules(job_task: Task, message: str | None) -> None:
    why = refusal(job_task)
    assert why is None if message is None else message in str(why)


def test_it_says_that_it_needs_gpus() -> None:
    assert "needs GPUs" in str(refusal(make_task(method="async-grpo")))


# Requests and files.


def test_a_probe_is_the_trainer_alone() -> None:
    job_task = task(4, global_batch=48)
    candidate = ASYNC.complete({"token_budget": 8192, "sharding": "fsdp2"}, job_task)
    load = ASYNC.load_request(candidate, job_task)
    assert (
        load["server"] is None and load["engine"] is None and load["launch"]["sharding"] == "fsdp2"
    )
    assert load["idle"] == {"gpus": 1}, (
        "the trainer must not see them: transformers would use them too"
    )
    assert candidate.load["ranks"] == 3
    probe = json.loads(json.dumps(ASYNC.probe_request(candidate, job_task, ProbePlan())))
    assert probe["settings"]["token_budget"] == 8192 and "use_vllm" not in probe["settings"]


def test_its_files_name_vllms_own_server(tmp_path: Path) -> None:
    job_task = task(4, global_batch=48, held_values={"server_gpus": 2})
    paths = ASYNC.write_files(
        ASYNC.complete({"token_budget": 8192, "sharding": "fsdp2"}, job_task), job_task, tmp_path
    )
    assert {path.name for path in paths} == {
        "recommended.yaml",
        "accelerate.yaml",
        "launch.sh",
        "train.py",
        "train.jsonl",
    }
    launch = (tmp_path / "launch.sh").read_text()
    assert "VLLM_SERVER_DEV_MODE=1" in launch and "serve made/up --tensor-parallel-size 2" in launch
    assert (
        """--weight-transfer-config '{"backend":"nccl"}'""" in launch
        and "--max-model-len 1536" in launch
    )
    assert 'cut -d, -f3-4 <<<"$gpus"' in launch and "--vllm_server_base_url" in launch
    accelerate = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert (accelerate["distributed_type"], accelerate["num_processes"]) == ("FSDP", 2)


@pytest.mark.slow
def test_trl_accepts_the_written_fields(tmp_path: Path) -> None:
    """The written script, up to its trainer: TRL's own parser reads the YAML, and the reward can
    be sent to a process.
    """
    pytest.importorskip("trl")
    job_task = task(
        4,
        global_batch=48,
        tuning="lora",
        held_values={"server_gpus": 2, "temperature": 0.7},
    )
    knobs = {"token_budget": 8192, "max_inflight_tasks": 256}
    ASYNC.write_files(ASYNC.complete(knobs, job_task), job_task, tmp_path)
    caught = (
        "import json, pickle, runpy, sys\nimport transformers.training_args as"
        " t\nt.is_torch_bf16_gpu_available = lambda: True\nimport trl.experimental.async_grpo as"
        " package\nclass Caught:\n    def __init__(self, **given):\n        args, peft ="
        " given['args'], given['peft_config']\n        names = ('token_budget',"
        " 'max_inflight_tasks', 'temperature', 'gradient_accumulation_steps', 'dtype',\n          "
        "       'vllm_server_base_url', 'model_init_kwargs', 'max_staleness')\n        found ="
        " {name: getattr(args, name) for name in names}\n        (reward,) ="
        " given['reward_funcs']\n        sys.modules['__main__'].overlong = reward\n        assert"
        " pickle.dumps(reward)\n        found |= {'model': given['model'], 'r': peft.r, 'rows':"
        " len(given['train_dataset'])}\n        found['reward'] = reward(completions=['a'],"
        " completion_ids=[[1]])\n        print(json.dumps(found)); raise"
        " SystemExit(0)\npackage.AsyncGRPOTrainer = Caught\nsys.argv = ['train.py',"
        f" *sys.argv[1:]]\nrunpy.run_path({str(tmp_path / 'train.py')!r}, run_name='__main__')\n"
    )
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            caught,
            "--config",
            str(tmp_path / "recommended.yaml"),
            "--vllm_server_base_url",
            "http://x:1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    parsed = json.loads(ended.stdout.splitlines()[-1])
    assert (parsed["token_budget"], parsed["max_inflight_tasks"], parsed["temperature"]) == (
        8192,
        256,
        0.7,
    )
    assert (parsed["dtype"], parsed["vllm_server_base_url"], parsed["model"], parsed["r"]) == (
        "float32",
        "http://x:1",
        "made/up",
        16,
    )
    assert (
        parsed["gradient_accumulation_steps"] == 3
        and parsed["rows"] == 1024
        and parsed["reward"] == [0]
    )
