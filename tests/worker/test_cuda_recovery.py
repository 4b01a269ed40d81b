"""A GPU's memory after a candidate, by the figures that torch and the driver give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.worker.drive import inside

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


LOADED = Driver(allocated=15 * GIB, reserved=15 * GIB, used=16 * GIB)


def check(now: Driver, *, first: bool = False) -> Any:
    recovery = inside("process_memory")
    return recovery.check(recovery.idle_memory(LOADED), recovery.idle_memory(now), first=first)


def test_small_growth_is_accepted() -> None:
    assert check(LOADED) == inside("process_memory").idle_memory(LOADED)
    check(replace(LOADED, allocated=15 * GIB + 64 * MIB, reserved=15 * GIB + 128 * MIB, used=16 * GIB + 128 * MIB))


def test_remaining_tensors_are_an_error() -> None:
    with pytest.raises(inside("process_memory").MemoryKept, match="torch still holds 2147483648 bytes more"):
        check(Driver(allocated=17 * GIB, reserved=17 * GIB, used=18 * GIB))


def test_a_fragmented_cache_is_an_error() -> None:
    with pytest.raises(inside("process_memory").MemoryKept, match="in pieces"):
        check(Driver(allocated=15 * GIB, reserved=17 * GIB, used=18 * GIB))


def test_memory_outside_torch_may_grow_for_the_first_candidate_only() -> None:
    grown = replace(LOADED, used=18 * GIB)
    assert check(grown, first=True).outside_bytes == 3 * GIB
    with pytest.raises(inside("process_memory").MemoryKept, match="outside of torch"):
        check(grown)
