"""Sharding, gathering and kernels change no gradient: one step of the real trainer on two ranks,
over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks import trainer
from autotune.frameworks.trl.requests import launch_request
from autotune.worker.synthetic import tiny_config, write_model_folder
from tests.frameworks.conftest import make_task

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 1e-5
RANKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

Step = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    # Large enough that ZeRO-3 takes its matrices apart: below 100,000 elements DeepSpeed keeps them
    # whole.
    shape = tiny_config(
        vocab=512,
        layers=2,
        hidden=512,
    )
    model = write_model_folder(tmp_path_factory.mktemp("spread") / "model", shape, weights=True)
    done: dict[str, list[dict[str, Any]]] = {}

    def run(
        sharding: str, knobs: dict[str, Any] | None = None, **case: Any
    ) -> list[dict[str, Any]]:
        key = json.dumps([sharding, knobs, case], sort_keys=True)
        if key not in done:
            done[key] = on_ranks(
                model, tmp_path_factory.mktemp(sharding), sharding, knobs or {}, case
            )
        return done[key]

    return run


def on_ranks(
    model: Path,
    folder: Path,
    sharding: str,
    knobs: dict[str, Any],
    case: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return each rank's result. The launch is built by the trainer, as for a probe."""
    import torch

    task = make_task(RANKS)
    launch = launch_request(trainer("trl").complete({"sharding": sharding, **knobs}, task), task)
    file = folder / "case.json"
    file.write_text(json.dumps({"launch": launch, "folder": str(model), **case}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(file, rank, port) for rank in range(RANKS)]
    outputs = [process.communicate(timeout=280)[0] for process in ranks]
    for process, text in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, text[-3000:]
    return [torch.load(folder / f"rank{rank}" / "answer.pt") for rank in range(RANKS)]


def start(
    file: Path,
    rank: int,
    port: int,
) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.neutrality.spread_step", str(file)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **variables, "HF_HUB_OFFLINE": "1"}, **pipes
    )


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    import torch

    names = sorted(first["gradient"])
    assert names == sorted(second["gradient"])
    gradient = torch.cat([first["gradient"][name].flatten() for name in names])
    other_gradient = torch.cat([second["gradient"][name].flatten() for name in names])
    assert float(gradient.norm()) > 1e-6, "the batch would show no difference"
    return float((gradient - other_gradient).norm() / gradient.norm())


def check_same_step(
    plain: list[dict[str, Any]],
    spread: list[dict[str, Any]],
    wrapper: str,
) -> None:
    for plain_rank, spread_rank in zip(plain, spread, strict=True):
        assert plain_rank["completions"] == spread_rank["completions"], (
            "not the same generated batch"
        )
        assert spread_rank["wrapper"].startswith(wrapper) and spread_rank["finite"]
        assert distance(plain_rank, spread_rank) < ROUNDING


@pytest.mark.parametrize(
    ("sharding", "wrapper"),
    [
        ("fsdp2", "FSDP"),
        pytest.param("zero1", "DeepSpeedEngine", marks=[needs_deepspeed, pytest.mark.long]),
        pytest.param("zero2", "DeepSpeedEngine", marks=[needs_deepspeed, pytest.mark.long]),
        pytest.param("zero3", "DeepSpeedEngine", marks=needs_deepspeed),
    ],
)
def test_spreading_the_model_is_neutral(
    step: Step,
    sharding: str,
    wrapper: str,
) -> None:
    check_same_step(step("ddp"), step(sharding), wrapper)


@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_weights_are_really_taken_apart(step: Step, sharding: str) -> None:
    answers = step(sharding)
    all_numbers = answers[0]["all"]
    for answer in answers:
        assert 0.5 * all_numbers <= answer["held"] < 0.56 * all_numbers
    for answer in step("ddp"):
        assert answer["held"] == all_numbers


@needs_deepspeed
def test_gathering_for_generation_is_neutral(step: Step) -> None:
    check_same_step(
        step("ddp"), step("zero3", settings={"ds3_gather_for_generation": False}), "DeepSpeedEngine"
    )


@pytest.mark.long
def test_the_attention_kernel_is_neutral(step: Step) -> None:
    sdpa = step("ddp", model={"attn_implementation": "sdpa"})
    eager = step("ddp", model={"attn_implementation": "eager"})
    check_same_step(sdpa, eager, "DistributedDataParallel")


@pytest.mark.long
def test_reentrant_checkpointing_is_neutral(step: Step) -> None:
    ways = []
    for way in (False, True):
        ways.append(step("ddp", settings={"gradient_checkpointing_kwargs": {"use_reentrant": way}}))
    check_same_step(*ways, "DistributedDataParallel")
