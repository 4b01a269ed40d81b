from __future__ import annotations

from autotune.probe.gpu_set import RESIDUE_BYTES, wait_until_released

GIB = 2**30


class Hands:
    """Clock that advances by sleeping, and a device that releases memory on a schedule."""

    def __init__(self, *used: int) -> None:
        self.time, self.used = 0.0, list(used)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def read(self) -> int:
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]


def waited(*used: int, base: int = 3 * GIB, patience: float = 30.0) -> tuple[int, float]:
    hands = Hands(*used)
    return wait_until_released(hands.read, base, patience_seconds=patience, now=hands.now, sleep=hands.sleep), hands.time


def test_idle_device_takes_two_readings() -> None:
    above, seconds = waited(3 * GIB)
    assert above == 0 and 0 < seconds < 1


def test_wait_until_memory_is_released_and_stable() -> None:
    above, seconds = waited(30 * GIB, 20 * GIB, 10 * GIB, 3 * GIB + RESIDUE_BYTES, 3 * GIB)
    assert above == 0 and seconds > 0.3


def test_wait_while_another_process_releases() -> None:
    above, seconds = waited(3 * GIB, 2 * GIB, 1 * GIB, 1 * GIB)
    assert above == 0 and seconds > 0.25


def test_remaining_memory_is_returned_at_the_deadline() -> None:
    above, seconds = waited(5 * GIB, patience=2.0)
    assert above == 2 * GIB and 2.0 <= seconds < 2.3
