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

_COUNT_FIRST = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<name>\S.*)", re.IGNORECASE)

# H100x8; a name without a number, like RTX in RTX 3050, is no name of a GPU.
_COUNT_LAST = re.compile(r"(?P<name>[a-z][^\s=]*\d[^\s=]*?)\s*x\s*(?P<count>\d+)", re.IGNORECASE)

_SIZE_WITH_UNIT = re.compile(r"\d+(?:\.\d+)?\s*[MGT](?:i?B)?", re.IGNORECASE)

# Tolerance: drivers differ by a few hundred MiB per card; sizes of a family differ by far more.
_SAME_MEMORY = 0.05

EMULATED_MACHINE = "AUTOTUNE_EMULATED_MACHINE"
"""Variable by which the emulator's library finds the GPUs that it shows."""

MAX_DEVICES = 100_000  # largest number of devices that a prediction counts through

# Above it the patterns take seconds: each digit may be the last of a name.
_MAX_CHARACTERS = 200


def hardware(text: str, here: Sequence[Device] | None = None) -> Hardware:
    """Parse `--gpus` (`2xA100-40G`, `local`, `2xcpu`, or a card by its memory: `2xH300=280G`).
    `here` replaces this machine's GPUs.
    """
    # 1. How many of what: 8xH100, or H100x8.
    if len(text) > _MAX_CHARACTERS:
        raise BadInput(
            f"{text!r:.60}... is longer than any name of hardware.",
            way_out="Write it like 2xA100-40G, A100-40G, local, cpu or 2xcpu.",
        )
    match = _COUNT_LAST.fullmatch(text.strip()) or _COUNT_FIRST.fullmatch(text.strip())
    if match is None:
        raise BadInput(
            f"{text!r} names no hardware.",
            way_out="Write it like 2xA100-40G, A100-40G, local, cpu or 2xcpu.",
        )
    name = match["name"]
    count = _count(match["count"] or "1", text, name)

    # 2. Processors, GPUs of this machine, or GPUs of the catalogue.
    if name.lower() == "cpu":
        return _cpu(count)
    if name.lower() == "local":
        devices = devices_here() if here is None else tuple(here)
        return _local(count if match["count"] else None, devices)
    if "=" in name:
        return _by_memory(count, *name.split("=", 1))
    devices = gpus_here() if here is None else tuple(here)
    return _named(count, gpu_named(name), devices)


def _count(
    digits: str,
    text: str,
    name: str,
) -> int:
    if len(digits) > len(str(MAX_DEVICES)) or int(digits) > MAX_DEVICES:
        raise BadInput(
            f"{text!r:.60} is more than {MAX_DEVICES} devices.",
            way_out="Request fewer, like 8xH100.",
        )
    if int(digits) < 1:
        raise BadInput(
            f"{text!r} is no device at all.",
            way_out=f"Request at least one: --gpus 1x{name}.",
        )
    return int(digits)


def elsewhere(text: str) -> Hardware:
    """Parse `--gpus` for probes on other machines, which check their own hardware."""
    name = text.strip().lower()
    if name.endswith("local"):
        raise BadInput(
            f"--gpus {text} is about this machine, and probes are to run on others.",
            way_out="Name the GPUs, like --gpus 2xA100-40G, or type --gpus cpu.",
        )
    return replace(hardware(text, here=()), here=True)


def gpu_named(name: str) -> catalog.Gpu:
    """Return the GPU of this name; a family with several sizes is an error with the choices."""
    plain_name = _plain(name)
    for gpu in catalog.gpus():
        if plain_name in {_plain(spelling) for spelling in (gpu.name, *gpu.aliases)}:
            return gpu
    driver_gpu = _by_driver_name(name)
    if driver_gpu is not None:
        return driver_gpu
    names = []
    sizes = []
    for gpu in catalog.gpus():
        names.append(gpu.name)
        if _is_of_family(gpu, plain_name):
            sizes.append(gpu.name)
    if sizes:
        raise BadInput(
            f"{name!r} comes with different amounts of memory.",
            way_out=f"Say which: {' or '.join(sizes)}.",
        )
    raise UnknownName("GPU", name, names, listing="autotune show gpus")


def _is_of_family(gpu: catalog.Gpu, plain_name: str) -> bool:
    if gpu.family is None:
        return False
    family = _plain(gpu.family)
    return plain_name in (family, family.removeprefix("rtx"))


def _by_driver_name(name: str) -> catalog.Gpu | None:
    """Return the GPU of a name that nvidia-smi prints: NVIDIA A100-SXM4-40GB. The memory in such a
    name decides among the sizes of a family.
    """
    alike = [gpu for gpu in catalog.gpus() if _is_driver_name(gpu, name)]
    size = re.search(r"(\d+)\s*GB\b", name, re.IGNORECASE)
    if size is not None:
        alike = [gpu for gpu in alike if round(gpu.memory_mib / 1024) == int(size[1])]
    if len(alike) != 1:
        return None
    return alike[0]


def _is_driver_name(gpu: catalog.Gpu, name: str) -> bool:
    """Return True for names like the driver's: more than the word that a whole family shares."""
    lowered = name.lower()
    if not lowered.startswith(("nvidia ", "tesla ", "quadro ")):
        return False
    return any(_has_words(lowered, spelling) for spelling in gpu.names)


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
    nearest: catalog.Gpu | None = None
    least_difference = 0
    for gpu in catalog.gpus():
        if not any(_has_words(name, spelling) for spelling in gpu.names):
            continue
        difference = abs(gpu.memory_bytes - device.memory_bytes)
        is_close = difference <= _SAME_MEMORY * gpu.memory_bytes
        if is_close and (nearest is None or difference < least_difference):
            nearest = gpu
            least_difference = difference
    return nearest


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
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cpu(count: int) -> Hardware:
    cores = os.cpu_count() or 1
    if count > max(cores, 2):
        raise BadInput(
            f"{count} CPU ranks were requested on {cores} cores.",
            way_out=f"Request at most {max(cores, 2)}xcpu.",
        )
    return Hardware(
        kind="cpu",
        name="cpu",
        count=count,
        memory_bytes=machine_memory_bytes(),
        here=True,
    )


def _is_rehearsal() -> bool:
    """Return True if the GPUs that this process sees are emulated ones."""
    return EMULATED_MACHINE in os.environ


def _local(count: int | None, devices: tuple[Device, ...]) -> Hardware:
    """Return this machine's GPUs, or as many of them."""
    _require_equal(devices)
    if count is not None and count > len(devices):
        raise BadInput(
            f"{count} GPUs were requested, and this machine has {len(devices)}.",
            way_out=f"Type --gpus {len(devices)}xlocal.",
        )
    gpu = recognise(devices[0])
    memory = min(device.memory_bytes for device in devices)
    name = gpu.name if gpu else devices[0].name
    return Hardware(
        kind="cuda",
        name=name,
        count=count or len(devices),
        memory_bytes=memory,
        here=True,
        rehearsed=_is_rehearsal(),
    )


def _require_equal(devices: tuple[Device, ...]) -> None:
    """Refuse a machine without GPUs, and GPUs of which a job can't have several alike."""
    if not devices:
        raise BadInput(
            "--gpus local: no NVIDIA GPU is visible on this machine.",
            way_out=(
                "Type --gpus cpu for its processors. `predict`, `run` and `solve` also take GPUs by"
                " name, like --gpus 2xA100-40G; `guard` and `preflight` run where the GPUs are."
            ),
        )
    if len(devices) > 1 and any(device.slice_of for device in devices):
        raise BadInput(
            "GPUs of this machine are cut into slices by MIG, and a job sees one slice only.",
            way_out=_choices(devices, "uuid"),
        )
    names = {device.name for device in devices}
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise BadInput(
            f"This machine's GPUs differ ({listed}).", way_out=_choices(devices, "index")
        )


def _named(
    count: int,
    gpu: catalog.Gpu,
    devices: tuple[Device, ...],
) -> Hardware:
    """Return the named GPUs; `here` if a job would get exactly these."""
    alike = tuple(device for device in devices if recognise(device) == gpu)
    memory = min((device.memory_bytes for device in alike), default=gpu.memory_bytes)
    can_be_probed = gpu.probes and count <= len(alike)
    if can_be_probed and devices[:count] != alike[:count]:
        first = ", ".join(device.name for device in devices[:count])
        raise BadInput(
            f"A job of {count}x{gpu.name} would get other GPUs here ({first}).",
            way_out=_choices(alike, "index"),
        )
    return Hardware(
        kind="cuda",
        name=gpu.name,
        count=count,
        memory_bytes=memory,
        here=can_be_probed,
        rehearsed=can_be_probed and _is_rehearsal(),
    )


def _by_memory(
    count: int,
    name: str,
    memory: str,
) -> Hardware:
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
        if name.lower() in ("cpu", "local", "gpu"):
            name = f"GPU={memory}"
    return Hardware(
        kind="cuda",
        name=name,
        count=count,
        memory_bytes=parse_bytes(memory),
        here=False,
    )


def _choices(devices: tuple[Device, ...], by: str) -> str:
    """Return valid values of CUDA_VISIBLE_DEVICES, one per kind of device."""
    alike: dict[str, list[str]] = {}
    for device in devices:
        description = device.name
        if by != "index":
            description += f", {format_bytes(device.memory_bytes)}, {device.uuid}"
        alike.setdefault(description, []).append(str(getattr(device, by)))
    choices = []
    for description, numbers in alike.items():
        choices.append(f"{VISIBLE}={','.join(numbers)} ({description})")
    return f"Pick with {' or '.join(choices)}."


def _plain(name: str) -> str:
    return re.sub(r"(?<=\d)gb\b", "g", re.sub(r"[\s_-]", "", name.lower())).removeprefix("nvidia")


def _has_words(text: str, name: str) -> bool:
    """Match whole words and exclude variants: an RTX 4070 Ti is no RTX 4070."""
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])(?!\s+(?:ti|super|d)\b)", text)
        is not None
    )
