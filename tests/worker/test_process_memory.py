"""Memory of a process: meters, and what a candidate left behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.worker.phase_recorder import PhaseRecorder
from autotune.worker.process_memory import SLEEP_MISLEADS, CudaMeter
from autotune.worker.trl.grpo_probe import _cap_allocator
from tests.worker.drive import inside

TOTAL = 1000


class Cuda:
    """torch.cuda's memory functions over a device with other holders and a context."""

    def __init__(self, others_bytes: int = 0, context: int = 50) -> None:
        self.others, self.outside = others_bytes, context
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self.stats = {"num_alloc_retries": 0, "num_ooms": 0}
        self.fraction: float | None = None

    def set(self, allocated: int, reserved: int) -> None:
        self.allocated, self.reserved = allocated, reserved
        self.most_allocated, self.most_reserved = (
            max(self.most_allocated, allocated),
            max(self.most_reserved, reserved),
        )

    def mem_get_info(self) -> tuple[int, int]:
        return TOTAL - self.others - self.outside - self.reserved, TOTAL

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_allocated(self) -> int:
        return self.most_allocated

    def max_memory_reserved(self) -> int:
        return self.most_reserved

    def reset_peak_memory_stats(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def memory_stats(self) -> dict[str, int]:
        return dict(self.stats)

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fraction = fraction

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(uuid="5c0f3e00-aaaa")


def meter_on(
    cuda: Cuda,
    others_bytes: int | None = None,
    *,
    sleeps: bool = False,
) -> CudaMeter:
    return CudaMeter(SimpleNamespace(cuda=cuda), others_bytes=others_bytes, sleeps=sleeps)


def test_a_sleeping_engine_does_not_count_as_held() -> None:
    cuda = Cuda()
    meter = meter_on(cuda, 0, sleeps=True)
    cuda.set(700, 750)
    cuda.outside = 50 - 600  # 600 of torch's figures are not on the device
    assert meter.now() == 150


def test_the_peak_includes_memory_that_torch_has_released() -> None:
    cuda = Cuda(others_bytes=300)
    meter = meter_on(cuda, 300)
    cuda.set(400, 450)
    cuda.set(100, 200)
    assert meter.now() == 150
    assert meter.take_peak() == 500
    assert meter.take_peak() == 250
    totals = meter.totals()
    assert (totals["torch_allocated_bytes"], totals["torch_reserved_bytes"]) == (400, 450)
    assert totals["torch_reserved_why"] is None
    assert totals["device_uuid"] == "GPU-5c0f3e00-aaaa"


@pytest.mark.parametrize("others_bytes", [0, 300])
def test_memory_of_other_processes_counts_only_if_unknown(others_bytes: int) -> None:
    cuda = Cuda(others_bytes=300)
    cuda.set(100, 100)
    assert meter_on(cuda, others_bytes).take_peak() == 150 + 300 - others_bytes


def test_under_sleep_mode_the_reserved_figure_is_unknown() -> None:
    cuda = Cuda()
    meter = meter_on(cuda, 0, sleeps=True)
    cuda.set(100, 100)
    cuda.outside -= 80  # asleep: off the device, and still counted as reserved
    figures = meter.take_torch()
    assert figures is not None
    assert figures["reserved_bytes"] is None
    assert meter.take_peak() == 70
    assert meter.totals()["torch_reserved_bytes"] is None
    assert meter.totals()["torch_reserved_why"] == SLEEP_MISLEADS


def test_torchs_figures_by_phase() -> None:
    cuda = Cuda()
    stage = PhaseRecorder(
        emit=lambda event: None,
        device={"others_bytes": 0},
        meter=meter_on(cuda, 0),
    )
    with stage.inside("forward"):
        cuda.set(100, 120)
    with stage.inside("backward"):
        cuda.stats = {"num_alloc_retries": 2, "num_ooms": 1}
        cuda.set(300, 320)
    with stage.inside("forward"):
        cuda.set(150, 320)
    memory = stage.memory()
    assert memory["torch_by_phase"] == {
        "forward": {
            "allocated_bytes": 300,
            "reserved_bytes": 320,
            "retries": 0,
            "out_of_memory": 0,
        },
        "backward": {
            "allocated_bytes": 300,
            "reserved_bytes": 320,
            "retries": 2,
            "out_of_memory": 1,
        },
    }
    assert memory["phase_peak_bytes"] == {"forward": 370, "backward": 370}
    assert (memory["allocation_retries"], memory["allocation_failures"]) == (2, 1)


@pytest.mark.parametrize(
    ("cap", "fraction"),
    [
        (None, None),
        (1000, None),
        (650, 0.6),
        (40, 0.0),
    ],
)
def test_the_allocator_cap_excludes_the_context_and_other_processes(
    cap: int | None, fraction: float | None
) -> None:
    cuda = Cuda(others_bytes=300, context=50)
    _cap_allocator(cuda, cap, 300)
    assert cuda.fraction == fraction


MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Driver:
    """Values of `torch.cuda` at one moment."""

    allocated: int
    reserved: int
    used: int
    total: int = 80 * GIB

    def mem_get_info(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved


LOADED = Driver(
    allocated=15 * GIB,
    reserved=15 * GIB,
    used=16 * GIB,
)


def check(now: Driver, *, first: bool = False) -> Any:
    recovery = inside("process_memory")
    return recovery.check(recovery.idle_memory(LOADED), recovery.idle_memory(now), first=first)


def test_small_growth_is_accepted() -> None:
    assert check(LOADED) == inside("process_memory").idle_memory(LOADED)
    check(
        replace(
            LOADED,
            allocated=15 * GIB + 64 * MIB,
            reserved=15 * GIB + 128 * MIB,
            used=16 * GIB + 128 * MIB,
        )
    )


def test_remaining_tensors_are_an_error() -> None:
    with pytest.raises(
        inside("process_memory").MemoryKept, match="torch still holds 2147483648 bytes more"
    ):
        check(
            Driver(
                allocated=17 * GIB,
                reserved=17 * GIB,
                used=18 * GIB,
            )
        )


def test_a_fragmented_cache_is_an_error() -> None:
    with pytest.raises(inside("process_memory").MemoryKept, match="in pieces"):
        check(
            Driver(
                allocated=15 * GIB,
                reserved=17 * GIB,
                used=18 * GIB,
            )
        )


def test_memory_outside_torch_may_grow_for_the_first_candidate_only() -> None:
    grown = replace(LOADED, used=18 * GIB)
    assert check(grown, first=True).outside_bytes == 3 * GIB
    with pytest.raises(inside("process_memory").MemoryKept, match="outside of torch"):
        check(grown)
