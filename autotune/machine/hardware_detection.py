"""Hardware of a request: parses `--gpus` and inspects this machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune import catalog
from autotune.core.errors import BadInput, HardwareNotHere, UnknownName
from autotune.core.job import Hardware
from autotune.core.units import format_bytes, parse_bytes
from autotune.machine.host_memory import machine_memory_bytes
from autotune.machine.nvml import VISIBLE, Device, devices_here

_PATTERN = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*)", re.IGNORECASE)
_SIZE_WITH_UNIT = re.compile(r"\d+(?:\.\d+)?\s*[MGT](?:i?B)?", re.IGNORECASE)
# tolerance: drivers differ by a few hundred MiB per card; sizes of a family differ by far more
_SAME_MEMORY = 0.05
MAX_DEVICES = 100_000  # largest number of devices that a prediction counts through


def hardware(asked: str, here: Sequence[Device] | None = None) -> Hardware:
    """Parse `--gpus` (`2xA100-40G`, `local`, `2xcpu`, or a card by its memory: `2xH300=280G`).
    `here` replaces this machine's GPUs.
    """
    match = _PATTERN.fullmatch(asked.strip())
    if match is None:
        raise BadInput(
            f"{asked!r} names no hardware.",
            way_out="Write it like 2xA100-40G, A100-40G, local, cpu or 2xcpu.",
        )
    if len(match[1] or "") > len(str(MAX_DEVICES)) or int(match[1] or 1) > MAX_DEVICES:
        raise BadInput(
            f"{asked!r:.60} is more than {MAX_DEVICES} devices.",
            way_out="Request fewer, like 8xH100.",
        )
    count, name = int(match[1] or 1), match[2]
    if count < 1:
        raise BadInput(
            f"{asked!r} is no device at all.", way_out=f"Request at least one: --gpus 1x{name}."
        )
    if name.lower() == "cpu":
        return _cpu(count)
    if name.lower() == "local":
        return _local(count if match[1] else None, devices_here() if here is None else tuple(here))
    if "=" in name:
        return _by_memory(count, *name.split("=", 1))
    return _named(count, gpu_named(name), gpus_here() if here is None else tuple(here))


def elsewhere(asked: str) -> Hardware:
    """Parse `--gpus` for probes on other machines, which check their own hardware."""
    name = asked.strip().lower()
    if name.endswith("local"):
        raise BadInput(
            f"--gpus {asked} is about this machine, and probes are to run on others.",
            way_out="Name the GPUs, like --gpus 2xA100-40G, or type --gpus cpu.",
        )
    return replace(hardware(asked, here=()), here=True)


def gpu_named(name: str) -> catalog.Gpu:
    """Return the GPU of this name; a family with several sizes is an error with the choices."""
    known = catalog.gpus()
    wanted = _plain(name)
    for gpu in known:
        if wanted in {_plain(spelling) for spelling in (gpu.name, *gpu.aliases)}:
            return gpu
    sizes = [
        gpu.name
        for gpu in known
        if gpu.family and wanted in (_plain(gpu.family), _plain(gpu.family).removeprefix("rtx"))
    ]
    if sizes:
        raise BadInput(
            f"{name!r} comes with different amounts of memory.",
            way_out=f"Say which: {' or '.join(sizes)}.",
        )
    raise UnknownName("GPU", name, [gpu.name for gpu in known], listing="autotune show gpus")


def gpu_of(hardware: Hardware) -> catalog.Gpu | None:
    """Return the catalogue entry; None for CPUs and unknown cards."""
    if hardware.kind == "cpu":
        return None
    try:
        return gpu_named(hardware.name)
    except UnknownName:
        return None


def can_be_probed(hardware: Hardware) -> bool:
    """Return True if probes support this kind of device."""
    return all(gpu.probes for gpu in catalog.gpus() if gpu.name == hardware.name)


def recognise(device: Device) -> catalog.Gpu | None:
    """Return the catalogue entry of a GPU by name, then by memory; None for a MIG slice."""
    name = device.name.lower()
    if device.slice_of is not None or " mig " in name:
        return None
    alike = [gpu for gpu in catalog.gpus() if any(_has_words(name, words) for words in gpu.names)]
    close = [
        gpu
        for gpu in alike
        if abs(gpu.memory_bytes - device.memory_bytes) <= _SAME_MEMORY * gpu.memory_bytes
    ]
    return min(close, key=lambda gpu: abs(gpu.memory_bytes - device.memory_bytes), default=None)


def gpus_here() -> tuple[Device, ...]:
    """Return the visible NVIDIA GPUs; empty if the driver does not answer."""
    try:
        return devices_here()
    except HardwareNotHere:
        return ()


def processor() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _cpu(count: int) -> Hardware:
    cores = os.cpu_count() or 1
    if count > max(cores, 2):
        raise BadInput(
            f"{count} CPU ranks were requested on {cores} cores.",
            way_out=f"Request at most {max(cores, 2)}xcpu.",
        )
    return Hardware(
        kind="cpu", name="cpu", count=count, memory_bytes=machine_memory_bytes(), here=True
    )


def _local(count: int | None, devices: tuple[Device, ...]) -> Hardware:
    if not devices:
        return _cpu(count or 1)
    if len(devices) > 1 and any(device.slice_of for device in devices):
        raise BadInput(
            "GPUs of this machine are cut into slices by MIG, and a job sees one slice only.",
            way_out=_choices(devices, "uuid"),
        )
    if len({device.name for device in devices}) > 1:
        names = ", ".join(sorted({device.name for device in devices}))
        raise BadInput(f"This machine's GPUs differ ({names}).", way_out=_choices(devices, "index"))
    if count is not None and count > len(devices):
        raise BadInput(
            f"{count} GPUs were requested and {len(devices)} are here.",
            way_out=f"Type --gpus {len(devices)}xlocal.",
        )
    gpu = recognise(devices[0])
    memory = min(device.memory_bytes for device in devices)
    name = gpu.name if gpu else devices[0].name
    return Hardware(
        kind="cuda", name=name, count=count or len(devices), memory_bytes=memory, here=True
    )


def _named(count: int, gpu: catalog.Gpu, devices: tuple[Device, ...]) -> Hardware:
    """Return the named GPUs; `here` if a job would get exactly these."""
    alike = [device for device in devices if recognise(device) == gpu]
    memory = min((device.memory_bytes for device in alike), default=gpu.memory_bytes)
    here = gpu.probes and count <= len(alike)
    if here and any(recognise(device) != gpu for device in devices[:count]):
        first = ", ".join(device.name for device in devices[:count])
        raise BadInput(
            f"A job of {count}x{gpu.name} would get other GPUs here ({first}).",
            way_out=_choices(tuple(alike), "index"),
        )
    return Hardware(kind="cuda", name=gpu.name, count=count, memory_bytes=memory, here=here)


def _by_memory(count: int, name: str, memory: str) -> Hardware:
    """Return a card of this memory for predictions; a known name has the catalogue's other
    figures.
    """
    name, memory = name.strip(), memory.strip()
    if not name or not _SIZE_WITH_UNIT.fullmatch(memory):
        raise BadInput(
            f"{name}={memory} is no card with its memory.",
            way_out="Write it like --gpus 2xH300=280G.",
        )
    try:
        name = gpu_named(name).name
    except UnknownName:
        name = f"GPU={memory}" if name.lower() in ("cpu", "local", "gpu") else name
    return Hardware(
        kind="cuda", name=name, count=count, memory_bytes=parse_bytes(memory), here=False
    )


def _choices(devices: tuple[Device, ...], by: str) -> str:
    """Return valid values of CUDA_VISIBLE_DEVICES, one per kind of device."""
    kinds: dict[str, list[Device]] = {}
    for device in devices:
        words = (
            device.name
            if by == "index"
            else f"{device.name}, {format_bytes(device.memory_bytes)}, {device.uuid}"
        )
        kinds.setdefault(words, []).append(device)
    shown = [
        f"{VISIBLE}={','.join(str(getattr(one, by)) for one in alike)} ({words})"
        for words, alike in kinds.items()
    ]
    return f"Pick with {' or '.join(shown)}."


def _plain(name: str) -> str:
    return re.sub(r"(?<=\d)gb\b", "g", re.sub(r"[\s_-]", "", name.lower())).removeprefix("nvidia")


def _has_words(text: str, words: str) -> bool:
    """Match whole words and exclude variants: an RTX 4070 Ti is no RTX 4070."""
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])(?!\s+(?:ti|super|d)\b)", text)
        is not None
    )
