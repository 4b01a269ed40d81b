"""Identity of a card: memory that a process takes outside torch, step by step, and what is there.

python benchmarks/first_light_card.py --out DIR        # appends facts to DIR/results.jsonl

The child process takes one step after the other, and the parent reads the driver's figures between
them. Facts that cannot be had are appended with their error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_record import FILE, Record

from autotune.core.units import MIB

Fact = dict[str, Any]

CHILD = """
import gc, json, sys
import torch

def tell(step, **figures):
    if torch.cuda.is_initialized():
        figures["allocated"] = torch.cuda.memory_allocated()
        figures["reserved"] = torch.cuda.memory_reserved()
        figures["free_and_total"] = torch.cuda.mem_get_info()
    print(json.dumps({"step": step, **figures}), flush=True)
    sys.stdin.readline()

def added_by(call):
    # Bytes that stay allocated beyond the result: a library's workspace.
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - result.numel() * result.element_size()

def bf16(*shape, **options):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, **options)

attention = torch.nn.functional.scaled_dot_product_attention
tell("imported")
torch.cuda.init()
torch.cuda.current_stream().synchronize()
tell("initialised")
ones = torch.ones(2**20, device="cuda")
torch.cuda.synchronize()
tell("first tensor and fill kernel")
a = bf16(2048, 2048)
tell("first bf16 product", workspace=added_by(lambda: a @ a))
tell("addmm", workspace=added_by(lambda: torch.addmm(a[0], a, a)))
q = bf16(1, 28, 1024, 128, requires_grad=True)
attention(q, q, q, is_causal=True).sum().backward()
torch.cuda.synchronize()
tell("causal attention, forward and backward")
mask = torch.ones(1, 1, 1024, 1024, device="cuda", dtype=torch.bool).tril()
attention(q, q, q, attn_mask=mask).sum().backward()
torch.cuda.synchronize()
tell("attention with a mask, forward and backward")
hidden = bf16(1024, 2048, requires_grad=True)
head = torch.nn.Parameter(bf16(32000, 2048))
labels = torch.randint(0, 32000, (1024,), device="cuda")
torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels).backward()
torch.optim.AdamW([head], fused=True).step()
torch.cuda.synchronize()
tell("cross entropy and fused AdamW")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    workspace = added_by(lambda: a @ a)
tell("product on a second stream", workspace=workspace)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = a @ a
torch.cuda.synchronize()
tell("a captured graph")
torch.sort(torch.randn(2**20, device="cuda"))
torch.multinomial(torch.rand(8, 151936, device="cuda"), 1)
torch.cuda.synchronize()
tell("sort and multinomial")
del ones, a, q, mask, hidden, head, labels, graph, captured
gc.collect()
torch.cuda.empty_cache()
tell("everything freed")
"""

SECOND_PROCESS = """
import sys
import torch
torch.ones(1, device="cuda")
print("ready", flush=True)
sys.stdin.readline()
"""

SMI_FIELDS = (
    "name,memory.total,memory.used,memory.reserved,driver_version,vbios_version,compute_cap,"
    "clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current,ecc.mode.current,compute_mode,"
    "persistence_mode,pcie.link.gen.current,pcie.link.width.current"
)
TOOLS = {
    "nvidia-smi": ("nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv"),
    "nvcc": ("nvcc", "--version"),
    "gcc": ("gcc", "--version"),
    "kernel": ("uname", "-r"),
    "cores": ("nproc",),
    "memory": ("free", "-g"),
    "disk": ("df", "-h", "/tmp", ".", "/dev/shm"),
}


class Driver:
    """NVML's figures of the first card."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)

    def memory(self) -> Fact:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._card)
        return {"used": memory.used, "free": memory.free, "total": memory.total}

    def used(self) -> int:
        return int(self.memory()["used"])

    def bytes_by_process(self) -> dict[int, int | None]:
        used = {}
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._card):
            used[process.pid] = process.usedGpuMemory
        return used

    def versions(self) -> Fact:
        return {
            "driver": self._nvml.nvmlSystemGetDriverVersion(),
            "cuda": self._nvml.nvmlSystemGetCudaDriverVersion_v2(),
        }


def outside_torch(driver: Driver) -> list[Fact]:
    """Return used bytes after each step of one process, and what a second one adds."""
    at_start = driver.used()
    steps: list[Fact] = [{"step": "nothing", "driver_used": at_start}]
    with _python(CHILD) as child:
        for step in _told(child):
            used = driver.used()
            outside = used - at_start - step.get("reserved", 0)
            step["driver_used"] = used
            step["driver_process"] = driver.bytes_by_process().get(child.pid)
            step["outside_torch_mib"] = round(outside / MIB, 1)
            steps.append(step)
            if step["step"] == "everything freed":
                steps.append({"step": "a second process", "added_mib": _added_by_second(driver)})
            _go_on(child)
    return steps


def _added_by_second(driver: Driver) -> float:
    before = driver.used()
    with _python(SECOND_PROCESS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        added = driver.used() - before
        _go_on(process)
    return round(added / MIB, 1)


def _python(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _told(process: subprocess.Popen[str]) -> Iterator[Fact]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def torch_facts() -> Fact:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "version": torch.__version__,
        "properties": str(properties),
        "multiprocessors": properties.multi_processor_count,
        "free_and_total": torch.cuda.mem_get_info(),
        "cudnn": torch.backends.cudnn.version(),
        "architectures": torch.cuda.get_arch_list(),
    }


def tools() -> Fact:
    answers = {}
    for name, command in TOOLS.items():
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except OSError as error:
            answers[name] = str(error)
        else:
            answers[name] = (result.stdout + result.stderr).strip()
    return answers


def _outcome_of(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def add_fact(
    record: Record,
    name: str,
    facts: Callable[[], Any],
) -> bool:
    """Append a fact, or the error in its place. Return False for an error."""
    try:
        value = facts()
    except Exception as error:  # the other facts are worth having
        value = {"error": f"{type(error).__name__}: {error}"[:600]}
    record.append("fact", name=name, value=value)
    print(json.dumps({name: value}, default=str)[:600], flush=True)
    return not (isinstance(value, dict) and "error" in value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    record = Record(parser.parse_args().out / FILE)
    driver = Driver()
    results = [
        add_fact(record, "outside torch", lambda: outside_torch(driver)),
        add_fact(record, "driver memory", driver.memory),
        add_fact(record, "driver versions", driver.versions),
        add_fact(record, "torch", torch_facts),
        add_fact(record, "tools", tools),
    ]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
