"""Tests on a real NVIDIA GPU of the parts that recordings and main memory emulate elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.machine.nvml import Nvml
from autotune.probe.ballast import Ballast, wait_until_released
from autotune.probe.device_meter import DeviceMeter, read

pytestmark = pytest.mark.gpu

GIB = 2**30
HOLD = """
import sys, torch
size = int(float(sys.argv[1]) * 2**30)
try:
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("oom", flush=True); sys.exit(0)
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holding(gib: float, uuid: str) -> Iterator[tuple[int, str]]:
    """A process that takes so much of the GPU by torch: its pid, and whether it got it."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    command = [sys.executable, "-c", HOLD, str(gib)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.communicate("\n")


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    connection = Nvml.open()
    yield connection
    connection.close()


def test_meter_samples_another_process_and_its_release(nvml: Nvml) -> None:
    uuid = nvml.cards()[0].uuid
    before = read(nvml, uuid)
    pids: list[int] = []
    meter = DeviceMeter(nvml, [uuid], {uuid: before}, lambda: pids)
    try:
        with holding(2, uuid) as (pid, word):
            assert word == "held"
            pids.append(pid)
            meter.look()
        peaks = meter.peaks()[uuid]
    finally:
        meter.close()
    assert 2 * GIB < peaks.peak_bytes < 4 * GIB
    assert peaks.listed_peak_bytes is None or 2 * GIB < peaks.listed_peak_bytes < 4 * GIB
    assert wait_until_released(lambda: nvml.used_bytes(uuid), before.used_bytes) == 0


def test_ballast_leaves_the_requested_size(nvml: Nvml) -> None:
    uuid = nvml.cards()[0].uuid
    before = nvml.used_bytes(uuid)
    ballast = Ballast(Path(sys.executable), uuid)
    try:
        reply = ballast.leave(8 * GIB)
        assert 8 * GIB - 2**24 <= reply.free_bytes <= 8 * GIB
        with holding(6, uuid) as (_, word):
            assert word == "held"
        with holding(8, uuid) as (_, word):
            assert word == "oom", "its context must come out of the 8 GiB, as on a small card"
        assert ballast.leave(16 * GIB).free_bytes <= 16 * GIB
        with holding(12, uuid) as (_, word):
            assert word == "held"
    finally:
        ballast.close()
    assert wait_until_released(lambda: nvml.used_bytes(uuid), before) == 0
