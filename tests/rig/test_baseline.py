from __future__ import annotations

from autotune.rig.baseline import BACK_BYTES, wait_until_back

GIB = 2**30


class Hands:
    """A clock that moves when somebody sleeps, and a device whose memory goes back on its own schedule."""

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
    return wait_until_back(hands.read, base, patience_seconds=patience, now=hands.now, sleep=hands.sleep), hands.time


def test_a_quiet_device_costs_one_more_look() -> None:
    above, seconds = waited(3 * GIB)
    assert above == 0 and 0 < seconds < 1


def test_it_waits_until_memory_has_gone_back_and_stays() -> None:
    above, seconds = waited(30 * GIB, 20 * GIB, 10 * GIB, 3 * GIB + BACK_BYTES, 3 * GIB)
    assert above == 0 and seconds > 0.3


def test_it_waits_while_a_neighbour_still_gives_back() -> None:
    above, seconds = waited(3 * GIB, 2 * GIB, 1 * GIB, 1 * GIB)
    assert above == 0 and seconds > 0.25


def test_what_stays_is_told_when_the_deadline_passes() -> None:
    above, seconds = waited(5 * GIB, patience=2.0)
    assert above == 2 * GIB and 2.0 <= seconds < 2.3
