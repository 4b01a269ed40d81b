"""ms-swift: its rules, its own parser on what is rendered, and real steps of `swift sft` on a
CPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune import frameworks
from autotune.catalog.model_lookup import find_model
from autotune.core.errors import CannotPredict
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks.launched_run import OUT
from autotune.frameworks.swift import Swift
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from autotune.worker.launched_output import MetricReader
from tests.frameworks.conftest import make_task
from tests.frameworks.model_files import shapes

ENVIRONMENTS = os.environ.get("AUTOTUNE_FRAMEWORKS")
PYTHON = Path(ENVIRONMENTS or "") / "swift" / "bin" / "python"
needs_swift = pytest.mark.skipif(not ENVIRONMENTS, reason="needs `make frameworks`")


def case_of(
    method: str, *, ranks: int = 2, kind: str = "cuda", tuning: str = "lora", **settings_held: Any
) -> tuple[Swift, Candidate, Task]:
    trainer = frameworks.trainer("swift", method)
    assert isinstance(trainer, Swift)
    task = make_task(
        ranks,
        kind,
        framework="swift",
        method=method,
        tuning=tuning,
        held_values=settings_held,
    )
    return trainer, trainer.complete({}, task), task


def refusal(method: str, **about: Any) -> str:
    trainer, candidate, task = case_of(method, **about)
    return trainer.why_illegal(candidate, task) or ""


@pytest.mark.parametrize(
    ("method", "about", "message"),
    [
        (
            "grpo",
            {"num_generations": 3, "gradient_accumulation_steps": 4},
            "divisible by num_generations",
        ),
        ("grpo", {"num_generations": 1}, "at least 2"),
        (
            "grpo",
            {
                "use_vllm": True,
                "vllm_mode": "colocate",
                "vllm_enable_lora": True,
                "tuning": "full",
                "gradient_accumulation_steps": 4,
            },
            "full tuning has none",
        ),
        (
            "grpo",
            {
                "use_vllm": True,
                "sleep_level": 1,
                "vllm_mode": "server",
                "gradient_accumulation_steps": 8,
            },
            "vllm_mode=colocate",
        ),
        ("sft", {"deepspeed": "zero9"}, "deepspeed must be one of"),
        ("sft", {"tuner_type": "full", "tuning": "qlora"}, "through an adapter"),
        ("sft", {"kind": "cpu", "deepspeed": "zero3"}, "need GPUs"),
    ],
)
def test_what_it_refuses_is_refused_with_setting_and_value(
    method: str,
    about: dict[str, Any],
    message: str,
) -> None:
    assert message in refusal(method, **about)


def test_autotunes_flags_are_its_settings_under_other_names() -> None:
    _, candidate, _ = case_of(
        "grpo",
        lora_r=32,
        max_completion_length=256,
        use_peft=True,
    )
    assert (candidate.settings["lora_rank"], candidate.settings["max_completion_length"]) == (
        32,
        256,
    )
    assert "use_peft" not in candidate.settings and "lora_r" not in candidate.settings
    assert "vllm_mode" not in case_of("grpo", use_vllm=False)[1].settings


def test_tokens_out_of_its_own_log() -> None:
    trainer, candidate, task = case_of("grpo", gradient_accumulation_steps=4)
    reader = MetricReader(
        json.loads(json.dumps(dataclasses.asdict(trainer.launch(candidate, task).figures)))
    )
    line = (
        '{"loss": 0.0, "completions/mean_length": 120.5, "memory(GiB)": 30.1,'
        ' "global_step/max_steps": "2/4"}'
    )
    assert reader.read(line, 1.0) is None
    figure = reader.read(line, 11.0)
    assert figure is not None and (figure.tokens, figure.seconds) == (round(120.5 * 8), 10.0)


@needs_swift
@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("sft", "sft"), ("grpo", "rlhf")])
def test_its_own_parser_takes_what_is_rendered(
    method: str,
    kind: str,
    tiny_model: Path,
) -> None:
    about: dict[str, Any] = {"gradient_accumulation_steps": 8, "deepspeed": "zero3"}
    trainer, _, task = case_of(method, **about, model_type="qwen2", template="qwen2_5")
    task = Task(
        workload=dataclasses.replace(task.workload, model=find_model(str(tiny_model))),
        hardware=task.hardware,
    )
    candidate = trainer.complete({}, task)
    *_, command, first = trainer.launch(candidate, task, ProbePlan()).argv[:5]
    assert (command, first) == (kind, "--model")
    arguments = [
        word.replace(OUT, "/run") for word in trainer.launch(candidate, task, ProbePlan()).argv[4:]
    ]
    arguments += [
        "--use_cpu",
        "true",
    ]  # bfloat16 is refused where there is no GPU and none is done without
    program = Path(__file__).parent / "accepts" / "swift_arguments.py"
    done = subprocess.run(
        [str(PYTHON), str(program), kind, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    understood = json.loads(done.stdout.strip().splitlines()[-1])
    assert understood["max_steps"] == 5 and understood["save_strategy"] == "no"
    assert understood["gradient_accumulation_steps"] == 8 and understood["tuner_type"] == "lora"


@needs_swift
@pytest.mark.slow
def test_real_steps_of_sft_on_a_cpu(tiny_model: Path) -> None:
    settings = {
        "max_length": 64,
        "model_type": "qwen2",
        "template": "qwen2_5",
        "per_device_train_batch_size": 2,
    }
    trainer, _, task = case_of(
        "sft",
        ranks=1,
        kind="cpu",
        tuning="full",
        **settings,
    )
    task = Task(
        workload=dataclasses.replace(
            task.workload, model=find_model(str(tiny_model)), python=PYTHON
        ),
        hardware=task.hardware,
    )
    candidate = trainer.complete({}, task)
    executor = LocalExecutor(
        RunnerSettings(
            python=PYTHON,
            adapter=trainer.adapter,
            ranks=1,
            limit_bytes=3 * 2**30,
        ),
        RequestBuilders(
            load=lambda probed: trainer.load_request(probed, task),
            probe=lambda probed, plan: trainer.probe_request(probed, task, plan),
        ),
    )
    try:
        measurement: Any = executor.open(candidate).measure(
            candidate, ProbePlan(timed_cycles=2, deadline_seconds=540)
        )
    finally:
        executor.close()
    assert measurement.outcome == "ok", measurement.failure
    # ms-swift accumulates up to a batch of 16 rows where nothing is stated.
    assert set(measurement.worst.cycle_loss_tokens) == {16 * 64}
    assert measurement.memory.peak_bytes > 200 * 2**20
    assert measurement.effective["max_length"] == 64 and len(measurement.effective) > 5
    assert [memory.rank for memory in measurement.memory.models] == [0]
    assert dict(measurement.memory.models[0].bytes) == in_float32(tiny_model)


def in_float32(model: Path) -> dict[str, int]:
    """Reckoned from its file: a gradient and AdamW's two moments for every weight, and the table
    of rotary frequencies.
    """
    config = json.loads((model / "config.json").read_text())
    trained = sum(4 * math.prod(shape) for shape in shapes(model))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # transformers keeps the frequencies twice: as they are used, and as they were.
    return {
        "weights": trained + 2 * 4 * (head // 2),
        "gradients": trained,
        "optimizer": 2 * trained,
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"teacher_model": "Qwen/Qwen3.5-9B"}, "another model"),
        ({"sequence_parallel_size": 2}, "divides a row"),
        ({"use_liger_kernel": True}, "without logits"),
    ],
)
def test_what_the_stand_in_step_lacks_is_refused_by_name(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotPredict, match=f"{next(iter(settings))}.*{reason}"):
        case_of("grpo", **settings)
    case_of("grpo", sequence_parallel_size=1)


def test_expert_parallelism_reaches_the_engine_that_serves() -> None:
    settings = {"use_vllm": True, "vllm_enable_expert_parallel": True}
    trainer, candidate, task = case_of("grpo", **settings)
    assert "--vllm_enable_expert_parallel true" in " ".join(trainer.launch(candidate, task).argv)
    trainer, candidate, task = case_of("grpo", **settings, vllm_mode="server")
    launch = trainer.launch(candidate, task)
    assert "--vllm_enable_expert_parallel true" in launch.files["rollout.sh"]
    assert "expert_parallel" not in " ".join(launch.argv)


def test_trainer_and_server_get_the_same_name_of_a_model() -> None:
    """ms-swift asks for `model_type` where a config.json fits several."""
    trainer, candidate, task = case_of(
        "grpo",
        use_vllm=True,
        vllm_mode="server",
        model_type="qwen2",
        template="qwen2_5",
    )
    launch = trainer.launch(candidate, task)
    for command in (" ".join(launch.argv), launch.files["rollout.sh"]):
        assert "--model_type qwen2 --template qwen2_5" in command


@pytest.mark.parametrize(
    ("attn_impl", "traced"), [(None, "sdpa"), ("flash_attn", "flash_attention_2"), ("sdpa", "sdpa")]
)
def test_flash_attn_is_its_name_of_transformers_flash_attention_2(
    attn_impl: str | None, traced: str
) -> None:
    """`AttnImpl.update_attn_impl` of ms-swift."""
    trainer, candidate, task = case_of("sft", attn_impl=attn_impl)
    spec: Any = trainer.trace_request(candidate, task)
    assert spec["model"]["attn_implementation"] == traced
