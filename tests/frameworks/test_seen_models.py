"""Model bytes that a probe of a launched framework reports, compared with the shapes in their
files.

The classes are the framework's own, under its own Python; verl, OpenRLHF and Open-Reasoner-Zero as
far as they run without a GPU: `sees/` states what had to be left out. ms-swift is probed whole in
test_swift.py.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from autotune import frameworks
from autotune.probe.assembly import models_of
from autotune.probe.message_validation import rank_result
from tests.frameworks.model_files import shapes
from tests.worker.drive import inside

ENVIRONMENTS = Path(os.environ.get("AUTOTUNE_FRAMEWORKS") or "absent")
SEES = Path(__file__).parent / "sees"
REPOSITORY = ENVIRONMENTS / "orz" / "repo"
RANKS = (0, 1)
PERSISTENT = 100_000
"""DeepSpeed's `stage3_param_persistence_threshold`: a weight of no more elements stays whole on
every rank, beside its part.
"""

FREQUENCIES = 2 * 16
"""Elements of the rotary table, which transformers keeps twice."""

pytestmark = pytest.mark.slow
needs_environments = pytest.mark.skipif(not ENVIRONMENTS.exists(), reason="needs `make frameworks`")
needs_the_repository = pytest.mark.skipif(
    not REPOSITORY.exists(), reason="needs a clone in .venvs/frameworks/orz/repo"
)


def run(
    framework: str,
    environment: str,
    program: str,
    model: Path,
    folder: Path,
    *which: str,
    **variables: str,
) -> None:
    """Two ranks of one group, as a probe would start them."""
    watch = frameworks.trainer(framework, "grpo").watch  # type: ignore[attr-defined]
    before = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    around = {**before, **inside("model_watch").environment(asdict(watch), folder, before)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    python = str(ENVIRONMENTS / environment / "bin" / "python")
    started = [
        subprocess.Popen(
            [python, str(SEES / program), str(model), str(rank), port, *which],
            env=around,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in RANKS
    ]
    for one_rank in started:
        output, _ = one_rank.communicate(timeout=500)
        assert one_rank.returncode == 0, output[-3000:]
        assert "autotune:" not in output, output[-3000:]


def measured(folder: Path) -> list[dict[str, int]]:
    """Bytes as the measurement reports them, rank after rank."""
    memories = models_of(
        {0: rank_result({"result": {"models": inside("model_watch").read_ranks(folder)}})}
    )
    assert [memory.rank for memory in memories] == list(RANKS)
    return [dict(memory.bytes) for memory in memories]


Shapes = tuple[tuple[int, ...], ...]


def in_zero3(
    model: Path,
    *,
    extra: Shapes = (),
    buffers: int = 0,
    gradient: int = 2,
) -> dict[str, int]:
    """bfloat16 weights, gradients, and a float32 copy with two moments: each rank has a half of
    each weight.
    """
    sizes = [math.prod(shape) for shape in (*shapes(model), *extra)]
    halves = sum(-(-size // 2) for size in sizes)
    persistent = (
        sum(2 * -(-size // 2) for size in sizes if size <= PERSISTENT) + FREQUENCIES + buffers
    )
    return {
        "weights": 2 * (halves + persistent),
        "gradients": gradient * halves,
        "optimizer": 3 * 4 * halves,
    }


def untrained(model: Path, *, extra: Shapes = ()) -> int:
    """Model before its weights were gathered for a step."""
    return 2 * (sum(-(-math.prod(shape) // 2) for shape in (*shapes(model), *extra)) + FREQUENCIES)


def of(role: str, parts: dict[str, int]) -> dict[str, int]:
    return {f"{role}_{name}": size for name, size in parts.items()}


@needs_environments
def test_verls_engines_under_fsdp2(tiny_model: Path, tmp_path: Path) -> None:
    run("verl", "verl", "verl_engines.py", tiny_model, tmp_path)
    half = sum(4 * math.prod(shape) // 2 for shape in shapes(tiny_model))
    policy = {"weights": half + 4 * FREQUENCIES, "gradients": half, "optimizer": 2 * half}
    for rank, memory in enumerate(measured(tmp_path)):
        # A head of one row and its bias lie on the first rank, and on the other as padding.
        head = 4 * (128 + 1)
        trained = half + head if rank == 0 else half
        critic = {
            "weights": policy["weights"] + head,
            "gradients": trained,
            "optimizer": 2 * trained,
        }
        assert memory == {**policy, **of("critic", critic), "reference_weights": policy["weights"]}


@needs_environments
def test_skyrls_workers_under_fsdp2(tiny_model: Path, tmp_path: Path) -> None:
    """A real forward and backward pass. `optimizer_step` frees the gradients; the output layer
    is no longer tied.
    """
    run("skyrl", "skyrl", "skyrl_workers.py", tiny_model, tmp_path)
    sizes = [math.prod(shape) for shape in shapes(tiny_model)]
    half = 4 * (sum(sizes) + max(sizes)) // 2
    policy = {"weights": half + 4 * FREQUENCIES, "optimizer": 2 * half}
    for memory in measured(tmp_path):
        assert memory == {**policy, "reference_weights": policy["weights"]}


@needs_environments
@pytest.mark.long  # two minutes: only a new release of OpenRLHF or DeepSpeed can change it
def test_openrlhfs_actors_under_zero3(tiny_model: Path, tmp_path: Path) -> None:
    for which in ("policy", "critic", "reference"):
        run("openrlhf", "openrlhf", "openrlhf_actors.py", tiny_model, tmp_path, which)
    policy = in_zero3(tiny_model)
    critic = in_zero3(
        tiny_model, extra=((1, 128),), buffers=2
    )  # a head for values, and the mean and spread of rewards
    for memory in measured(tmp_path):
        assert memory == {
            **policy,
            **of("critic", critic),
            "reference_weights": untrained(tiny_model),
        }


@needs_environments
@needs_the_repository
def test_open_reasoner_zeros_actors_under_zero3(tiny_model: Path, tmp_path: Path) -> None:
    for which in ("Policy", "Critic", "Ref", "Reward"):
        run(
            "open-reasoner-zero",
            "orz",
            "orz_actors.py",
            tiny_model,
            tmp_path,
            which,
            PYTHONPATH=str(REPOSITORY),
        )
    head = ((1, 128), (1,))
    policy = in_zero3(tiny_model, gradient=4)
    # What stands in for these two keeps its frequencies in float32.
    critic = in_zero3(
        tiny_model,
        extra=head,
        gradient=4,
        buffers=FREQUENCIES,
    )
    reward = untrained(tiny_model, extra=head) + 2 * FREQUENCIES
    frozen = {"reference_weights": untrained(tiny_model), "reward_weights": reward}
    for memory in measured(tmp_path):
        assert memory == {**policy, **of("critic", critic), **frozen}


@needs_environments
def test_the_stand_ins_fused_head_allocates_as_verls_own() -> None:
    """Peaks of the CPU allocator, with frozen and with trained words; the stand-in lacks one
    temporary of the gradient.
    """
    python, root = str(ENVIRONMENTS / "verl" / "bin" / "python"), str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, str(SEES / "verl_fused_head.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    for verl, stand_in in json.loads(done.stdout.strip().splitlines()[-1]):
        assert stand_in == pytest.approx(verl, rel=0.02)
