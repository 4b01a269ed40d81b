from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.errors import ProbeError
from autotune.probe.ballast import Ballast
from autotune.worker.ballast_process import GRAIN_BYTES, SLACK_BYTES, HeldBallast
from tests.probe.ballasts import host_ballast
from tests.probe.toys import gone, running

MIB = 2**20


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


def test_ballast_holds_releases_and_ends() -> None:
    ballast = host_ballast(96)
    try:
        reply = ballast.leave(32 * MIB)
        assert (reply.held_bytes, reply.free_bytes, reply.total_bytes) == (
            64 * MIB,
            32 * MIB,
            96 * MIB,
        )
        assert resident_mib(ballast.pid) > 64
        assert ballast.leave(80 * MIB).held_bytes == 16 * MIB
        assert resident_mib(ballast.pid) < 64
        assert ballast.leave(32 * MIB).free_bytes == 32 * MIB
        assert ballast.leave(2**62).held_bytes == 0
        assert ballast.alive
    finally:
        ballast.close()
    assert gone(ballast.pid)
    assert not ballast.alive
    ballast.close()


def test_killed_ballast_is_detected() -> None:
    ballast = host_ballast(16)
    try:
        ballast.leave(8 * MIB)
        os.kill(ballast.pid, signal.SIGKILL)
        assert gone(ballast.pid)
        assert not ballast.alive
        with pytest.raises(ProbeError, match="ended, or did not answer"):
            ballast.leave(4 * MIB)
    finally:
        ballast.close()


def test_ballast_exits_with_its_killed_owner() -> None:
    code = (
        "import sys, time; from tests.probe.ballasts import host_ballast; b = host_ballast(16);"
        " b.leave(0); print(b.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert running(pid)
        owner.kill()
    assert gone(pid)


def test_missing_cuda_is_reported() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("here it would work")
    ballast = Ballast(Path(sys.executable), "GPU-x")
    try:
        with pytest.raises(ProbeError, match=r"GPU GPU-x can't be made smaller: .*libcuda"):
            ballast.leave(0)
        assert gone(ballast.pid)
    finally:
        ballast.close()


class PaperCard:
    """A card whose own bookkeeping takes a page for every piece, and which refuses pieces beyond
    some size.
    """

    def __init__(
        self,
        total: int,
        used: int,
        largest: int,
    ) -> None:
        self.total, self.used, self.largest = total, used, largest

    def figures(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def take(self, size: int) -> int | None:
        if size > self.largest or size + 4096 > self.total - self.used:
            return None
        self.used += size + 4096
        return size

    def give(self, piece: int) -> None:
        self.used -= piece + 4096


@settings(deadline=None)
@given(
    total=st.integers(64 * MIB, 8192 * MIB),
    context=st.integers(0, 64 * MIB),
    largest=st.integers(GRAIN_BYTES, 2048 * MIB),
    wishes=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_free_memory_is_as_requested_or_slightly_less(
    total: int,
    context: int,
    largest: int,
    wishes: list[float],
) -> None:
    card = PaperCard(total, context, largest)
    ballast = HeldBallast(card)
    for wish in wishes:
        requested = int(wish * (total - context))
        answer = ballast.leave(requested)
        assert answer["free_bytes"] == card.figures()[0]
        # Where hardly anything is to be left, its last grain may not be had whole.
        assert requested - SLACK_BYTES <= answer["free_bytes"] <= max(requested, GRAIN_BYTES + 4096)
