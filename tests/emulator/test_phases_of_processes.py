"""Phases that frameworks' own functions begin, and what is recorded when a process gets its
role.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autotune.emulator.inject import emulator_phases


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the phases that begin; the process is loading."""
    names: list[str] = []
    monkeypatch.setattr(emulator_phases, "_phase", "load")
    monkeypatch.setattr(emulator_phases, "_report_phase", names.append)
    return names


class Engine:
    def step(self) -> None:
        """Update the weights."""


def test_a_deepspeed_engine_is_made_in_the_phase_that_lasts(phases: list[str]) -> None:
    class Made(Engine):
        """The patched methods stay in this class."""

    module = SimpleNamespace(DeepSpeedEngine=Made)
    emulator_phases.PHASE_HOOKS["deepspeed.runtime.engine"](module)  # type: ignore[arg-type]
    Made().step()
    assert phases == ["load", "optimizer", "forward"]


def test_open_reasoner_zeros_weight_sync_is_a_phase_on_both_sides(phases: list[str]) -> None:
    class Handle:
        @staticmethod
        def from_tensor(tensor: str) -> str:
            return tensor

    class Worker:
        def update_weight_internal_with_cuda_ipc(self, name: str) -> None:
            """Copy a weight from the other process."""

    places = "orz.exp_engine"
    emulator_phases.PHASE_HOOKS[f"{places}.parallels.orz_distributed_c10d"](
        SimpleNamespace(CUDAIPCHandle=Handle)
    )  # type: ignore[arg-type]
    worker = f"{places}.accelerators.inference.vllm_worker_wrap"
    hook = emulator_phases.PHASE_HOOKS[worker]
    hook(SimpleNamespace(WorkerWrap=Worker))  # type: ignore[arg-type]
    assert Handle.from_tensor("weights") == "weights"
    Worker().update_weight_internal_with_cuda_ipc("embeddings")
    assert phases == 2 * ["weight sync", "load"]
