"""Memory of one rank and its nearest limit."""

from __future__ import annotations

import resource
import subprocess
import sys
from types import SimpleNamespace

from autotune.core.units import GIB, MIB
from autotune.integrations.memory_margin import CpuGauge, CudaGauge
from autotune.machine.host_memory import machine_memory_bytes

LIMITED = """
import resource
from autotune.integrations.memory_margin import CpuGauge
gauge = CpuGauge()
before = gauge.read()
mapped = gauge.read
data = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 300 * 2**20, resource.RLIM_INFINITY))
first = gauge.read()
held = bytearray(200 * 2**20)
second = gauge.read()
del held
third = gauge.read()
print(before.by, first.by, first.margin_bytes // 2**20, second.margin_bytes // 2**20, third.margin_bytes // 2**20, sep="|")
"""


def test_a_data_limit_is_the_nearest_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    before, by, *margins = done.stdout.strip().split("|")
    first, second, third = map(int, margins)
    assert before == "the machine's memory" and "ulimit -d" in by
    assert 280 <= first <= 300 and 195 <= first - second <= 205
    assert third == second, "a peak stays"


def test_without_one_it_is_the_machines() -> None:
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    gauge = CpuGauge()
    first = gauge.read()
    held = bytearray(200 * MIB)
    second = gauge.read()
    assert first.limit_bytes == machine_memory_bytes() and first.outside_bytes is None
    assert second.peak_bytes >= first.peak_bytes and len(held) and second.peak_bytes >= 200 * MIB


def test_memory_of_children_counts() -> None:
    gauge = CpuGauge()
    before = gauge.read().peak_bytes
    code = "held = bytearray(300 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert gauge.read().peak_bytes >= before + 250 * MIB
        child.communicate("\n")


def cuda(**figures: int) -> SimpleNamespace:
    """torch.cuda with one device's figures, in GiB."""
    said = {name: lambda device, size=size: size * GIB for name, size in figures.items() if name not in ("free", "total")}
    return SimpleNamespace(
        cuda=SimpleNamespace(mem_get_info=lambda device: (figures["free"] * GIB, figures["total"] * GIB), **said)
    )


def test_a_gpus_peak_is_torchs_plus_memory_outside() -> None:
    torch = cuda(free=50, total=80, memory_reserved=24, max_memory_reserved=40)
    found = CudaGauge(torch, "cuda:0", sleeps=False).read()
    assert (found.peak_bytes, found.outside_bytes, found.margin_bytes) == (46 * GIB, 6 * GIB, 34 * GIB)


def test_where_an_engine_sleeps_torchs_figure_misleads_and_the_device_counts() -> None:
    torch = cuda(free=50, total=80, memory_reserved=60, max_memory_reserved=75)
    gauge = CudaGauge(torch, "cuda:0", sleeps=True)
    assert gauge.read().peak_bytes == 30 * GIB
    torch.cuda.mem_get_info = lambda device: (60 * GIB, 80 * GIB)
    assert gauge.read().peak_bytes == 30 * GIB, "the most that was seen"
