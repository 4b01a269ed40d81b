"""A GPU's memory after a candidate, by the figures that torch and the driver give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.inside.drive import inside

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Driver:
    """What `torch.cuda` answers at one moment."""

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
    recovery = inside("adapters.cuda_recovery")
    return recovery.check(recovery.standing(LOADED), recovery.standing(now), first=first)


def test_what_came_back_is_back() -> None:
    assert check(LOADED) == inside("adapters.cuda_recovery").standing(LOADED)
    check(replace(LOADED, allocated=15 * GIB + 64 * MIB, reserved=15 * GIB + 128 * MIB, used=16 * GIB + 128 * MIB))


def test_tensors_that_stay_are_noticed() -> None:
    with pytest.raises(inside("adapters.cuda_recovery").MemoryKept, match="torch still holds 2147483648 bytes more"):
        check(Driver(allocated=17 * GIB, reserved=17 * GIB, used=18 * GIB))


def test_a_cache_in_pieces_is_noticed() -> None:
    with pytest.raises(inside("adapters.cuda_recovery").MemoryKept, match="in pieces"):
        check(Driver(allocated=15 * GIB, reserved=17 * GIB, used=18 * GIB))


def test_outside_of_torch_only_the_first_candidate_may_grow() -> None:
    grown = replace(LOADED, used=18 * GIB)
    assert check(grown, first=True).outside_bytes == 3 * GIB
    with pytest.raises(inside("adapters.cuda_recovery").MemoryKept, match="outside of torch"):
        check(grown)
