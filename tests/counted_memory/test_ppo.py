"""Predictions of TRL's PPO by a generic step, against a probe on real tensors."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune import frameworks
from autotune.core.job import Hardware, Model, Task, Workload
from autotune.core.prediction import Prediction
from autotune.core.units import GIB
from autotune.prediction.service import PredictionService, open_tracers
from tests.counted_memory import counting
from tests.counted_memory.cases import SHAPE
from tests.worker.drive import load_request, measure_request

OVERLAYS = os.environ.get("AUTOTUNE_TRL_OVERLAYS")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(not OVERLAYS, reason="needs `make trl-overlays`"),
    pytest.mark.skipif(
        counting.WITHOUT_COMPILER is not None, reason=str(counting.WITHOUT_COMPILER)
    ),
]
RELEASE = "1.8.0"
LORA = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": None}
PROMPT, COMPLETION = 24, 40
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 2000}
CASES: Mapping[str, Mapping[str, Any]] = {
    "logits": {
        "config": {"vocab_size": 32_000},
        "settings": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    },
    "activations": {
        "config": {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 768}
    },
    "adapter": {"config": {"hidden_size": 256, "intermediate_size": 768}, "adapter": LORA},
}
"""Cases with the largest part in a different place each time."""


CLOSE = 0.12
"""Largest relative error of the value: a fully trained critic keeps more for its backward pass
than the generic step.
"""


@pytest.mark.parametrize(
    "name",
    [
        "adapter",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("logits", "activations")),
    ],
)
def test_the_probes_peak_is_inside_the_predicted_interval(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found, foretold = counted(case, tmp_path), predicted(case)
    peak, whole = max(found["phases"].values()), foretold.torch_peak_allocated_bytes
    assert whole.low <= peak <= whole.high and abs(whole.value / peak - 1) <= CLOSE, (
        whole,
        found["phases"],
    )
    phases = {phase.name: phase.parts for phase in foretold.phases}
    for part in ("critic_weights", "critic_optimizer", "reward_weights"):
        assert phases["rollout"][part] == pytest.approx(found["models"][part], rel=0.01), part
    assert ("reference_weights" in phases["score"]) is ("reference_weights" in found["models"])
    where = max(found["phases"], key=lambda phase: found["phases"][phase])
    assert where == ("rollout" if name == "logits" else "backward")


def counted(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    load = load_request(
        folder / "scratch", method="ppo", config=config_of(case), adapter=case.get("adapter")
    )
    measure = {
        **measure_request(prompt=PROMPT, completion=COMPLETION),
        "settings": settings_of(case),
    }
    (folder / "requests.json").write_text(json.dumps({"load": load, "measure": measure}))
    path = os.pathsep.join(
        [
            str(Path(OVERLAYS or "") / f"trl-{RELEASE}"),
            *sys.path[:1],
            str(Path(__file__).parents[2]),
        ]
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.counted_memory.counted_ppo",
            str(counting.compiled()),
            str(folder / "requests.json"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        env={**os.environ, **counting.QUIET, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def predicted(case: Mapping[str, Any]) -> Prediction:
    held = {
        **settings_of(case),
        "max_prompt_length": PROMPT,
        "response_length": COMPLETION,
        **(case.get("adapter") or {}),
    }
    model = Model(name="made", config=config_of(case), folder=None, origin="made up")
    workload = Workload(
        model=model,
        method="ppo",
        python=Path(sys.executable),
        tuning="lora" if case.get("adapter") else "full",
        held={name: value for name, value in held.items() if value is not None},
    )
    task = Task(
        workload=workload,
        hardware=Hardware(kind="cpu", name="cpu", count=1, memory_bytes=8 * GIB, here=True),
    )
    trainer = frameworks.trainer("trl", "ppo")
    with contextlib.closing(
        PredictionService(
            task=task, trainer=trainer, limit_bytes=8 * GIB, tracer=open_tracers(task, trainer)
        )
    ) as foresight:
        return foresight.predict(trainer.complete({}, task))


def config_of(case: Mapping[str, Any]) -> dict[str, Any]:
    return {**SHAPE, **SMALL, **case.get("config", {})}


def settings_of(case: Mapping[str, Any]) -> dict[str, Any]:
    whole = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "local_rollout_forward_batch_size": 4,
    }
    return {**whole, **case.get("settings", {})}
