"""Memory of one rank, its nearest limit, and warnings by its trend."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.units import GIB, MIB
from autotune.integrations.memory_margin import (
    MAX_POINTS,
    CpuGauge,
    CudaGauge,
    GaugeReading,
    Margin,
)
from autotune.machine.host_memory import machine_memory_bytes

LIMIT = 40 * GIB


def reading(peak: float) -> GaugeReading:
    return GaugeReading(
        peak_bytes=round(peak),
        limit_bytes=LIMIT,
        by="GPU 0",
    )


def run(
    peaks: list[float],
    *,
    last_step: int | None = 1000,
    lengths: list[int] | None = None,
    longest: int | None = None,
) -> list[str]:
    margin = Margin(last_step=last_step, longest=longest)
    warnings: list[str] = []
    highest = 0.0
    for step, peak in enumerate(peaks, start=1):
        highest = max(highest, peak)
        warnings += margin.look(step, reading(highest), lengths[step - 1] if lengths else None)
    return warnings


def test_a_steady_run_is_left_alone() -> None:
    noise = random.Random(0)
    assert run([20 * GIB + noise.randrange(4 * MIB) for _ in range(300)]) == []


def test_each_narrow_margin_is_reported_once() -> None:
    shares = [0.8, 0.91, 0.92, 0.96, 0.96, 0.985, 0.985, 0.99]
    warnings = run([share * LIMIT for share in shares])
    assert len(warnings) == 3
    assert warnings[0].startswith("3.6 GiB left of 40 GiB, GPU 0") and "1.6 GiB left" in warnings[1]


def test_growth_that_crosses_the_limit_is_reported_early() -> None:
    growing = [20 * GIB + step * 64 * MIB for step in range(60)]
    (warning,) = run(growing)
    assert "grows by 64 MiB (at least 64 MiB) a step" in warning and "the run takes 1000" in warning
    assert run(growing, last_step=100) == [], "it ends before"
    assert run(growing, last_step=None) == [], "nobody knows how long it takes"


def test_longer_completions_are_carried_on_to_the_longest_allowed() -> None:
    lengths = [100 + 20 * step for step in range(30)]
    peaks = [10 * GIB + length * 32 * MIB for length in lengths]
    (warning,) = run(
        peaks,
        lengths=lengths,
        longest=1024,
        last_step=31,
    )
    assert (
        "with the allowed 1024" in warning and "so far) it is at least 42 GiB of 40 GiB" in warning
    )
    assert (
        run(
            peaks,
            lengths=lengths,
            longest=720,
            last_step=31,
        )
        == []
    ), "at their longest they fit"


def test_one_jump_is_no_trend() -> None:
    assert run([10 * GIB] * 20 + [20 * GIB] * 60) == []


@pytest.mark.parametrize("steps", [10, 1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_long_run_takes_no_more_memory_or_time_to_watch(steps: int) -> None:
    margin = Margin(last_step=steps, longest=4096)
    for step in range(1, steps + 1):
        margin.look(step, reading(20 * GIB), step)
    assert len(margin.by_step) <= MAX_POINTS and len(margin.by_length) <= MAX_POINTS
    assert steps < 3 or margin.by_step[-1].steps > steps / 2, "the trend is over the whole run"


LIMITED = (Path(__file__).parent / "programs/limited.py.txt").read_text()


def test_a_data_limit_is_the_nearest_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        check=True,
    )
    before, by, *margins = done.stdout.strip().split("|")
    first, second, third = map(int, margins)
    assert before == "the machine's memory" and "ulimit -d" in by
    assert 280 <= first <= 300 and 195 <= first - second <= 205
    assert third == second, "a peak stays"


def test_without_one_it_is_the_machines() -> None:
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    gauge = CpuGauge()
    first = gauge.read()
    allocation = bytearray(200 * MIB)
    second = gauge.read()
    assert first.limit_bytes == machine_memory_bytes() and first.outside_bytes is None
    assert (
        second.peak_bytes >= first.peak_bytes and len(allocation) and second.peak_bytes >= 200 * MIB
    )


def test_memory_of_children_counts() -> None:
    gauge = CpuGauge()
    before = gauge.read().peak_bytes
    code = "held = bytearray(300 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert gauge.read().peak_bytes >= before + 250 * MIB
        child.communicate("\n")


def cuda(**figures: int) -> SimpleNamespace:
    """torch.cuda with one device's figures, in GiB."""
    functions = {
        name: lambda device, size=size: size * GIB
        for name, size in figures.items()
        if name not in ("free", "total")
    }
    return SimpleNamespace(
        cuda=SimpleNamespace(
            mem_get_info=lambda device: (figures["free"] * GIB, figures["total"] * GIB), **functions
        )
    )


def test_a_gpus_peak_is_torchs_plus_memory_outside() -> None:
    torch = cuda(
        free=50,
        total=80,
        memory_reserved=24,
        max_memory_reserved=40,
    )
    gauge_reading = CudaGauge(torch, "cuda:0", sleeps=False).read()
    assert (gauge_reading.peak_bytes, gauge_reading.outside_bytes, gauge_reading.margin_bytes) == (
        46 * GIB,
        6 * GIB,
        34 * GIB,
    )


def test_where_an_engine_sleeps_torchs_figure_misleads_and_the_device_counts() -> None:
    torch = cuda(
        free=50,
        total=80,
        memory_reserved=60,
        max_memory_reserved=75,
    )
    gauge = CudaGauge(torch, "cuda:0", sleeps=True)
    assert gauge.read().peak_bytes == 30 * GIB
    torch.cuda.mem_get_info = lambda device: (60 * GIB, 80 * GIB)
    assert gauge.read().peak_bytes == 30 * GIB, "the most that was seen"
