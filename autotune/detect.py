"""Hardware by name and by sight: reads `--gpus`, and looks at what this machine has."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune import catalogue
from autotune.devices import VISIBLE, Device, devices_here
from autotune.errors import BadInput, HardwareNotHere, UnknownName
from autotune.hardware import Hardware
from autotune.units import format_bytes

_ASKED = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*)", re.IGNORECASE)
_SAME_MEMORY = 0.05
"""Drivers differ by a few hundred MiB on one card; the sizes of a family differ by far more."""


def hardware(asked: str, here: Sequence[Device] | None = None) -> Hardware:
    """What `--gpus` means: `2xA100-40G`, `local`, `cpu`, `2xcpu`. Looks at this machine unless told what is `here`."""
    match = _ASKED.fullmatch(asked.strip())
    if match is None:
        raise BadInput(f"{asked!r} names no hardware.", way_out="Write it like 2xA100-40G, A100-40G, local, cpu or 2xcpu.")
    count, name = int(match[1] or 1), match[2]
    if count < 1:
        raise BadInput(f"{asked!r} asks for no device at all.", way_out=f"Ask for at least one: --gpus 1x{name}.")
    if name.lower() == "cpu":
        return _cpu(count)
    if name.lower() == "local":
        return _local(count if match[1] else None, devices_here() if here is None else tuple(here))
    return _named(count, gpu_named(name), gpus_here() if here is None else tuple(here))


def elsewhere(asked: str) -> Hardware:
    """What `--gpus` means where probes run on other machines than this: they say themselves whether they have it."""
    name = asked.strip().lower()
    if name.endswith("local"):
        raise BadInput(
            f"--gpus {asked} is about this machine, and probes are to run on others.",
            way_out="Name the GPUs, like --gpus 2xA100-40G, or type --gpus cpu.",
        )
    return replace(hardware(asked, here=()), here=True)


def gpu_named(name: str) -> catalogue.Gpu:
    """The one GPU of this name; a family with several sizes is an error with the choices."""
    known = catalogue.gpus()
    wanted = _plain(name)
    for gpu in known:
        if wanted in {_plain(spelling) for spelling in (gpu.name, *gpu.aliases)}:
            return gpu
    sizes = [gpu.name for gpu in known if gpu.family and wanted in (_plain(gpu.family), _plain(gpu.family).removeprefix("rtx"))]
    if sizes:
        raise BadInput(f"{name!r} comes with different amounts of memory.", way_out=f"Say which: {' or '.join(sizes)}.")
    raise UnknownName("GPU", name, [gpu.name for gpu in known], listing="autotune show gpus")


def gpu_of(hardware: Hardware) -> catalogue.Gpu | None:
    """What the catalogue knows of it; None for a CPU and for a card that it does not have."""
    if hardware.kind == "cpu":
        return None
    try:
        return gpu_named(hardware.name)
    except UnknownName:
        return None


def can_be_probed(hardware: Hardware) -> bool:
    """Whether probes know this kind of device at all, wherever it is."""
    known = {gpu.name: gpu for gpu in catalogue.gpus()}
    return hardware.name not in known or known[hardware.name].probes


def recognise(device: Device) -> catalogue.Gpu | None:
    """The catalogue's entry for a GPU of this machine, by its name and then by its memory; None for a slice of one."""
    name = device.name.lower()
    if device.slice_of is not None or " mig " in name:
        return None
    alike = [gpu for gpu in catalogue.gpus() if any(_has_words(name, words) for words in gpu.names)]
    close = [gpu for gpu in alike if abs(gpu.memory_bytes - device.memory_bytes) <= _SAME_MEMORY * gpu.memory_bytes]
    return min(close, key=lambda gpu: abs(gpu.memory_bytes - device.memory_bytes), default=None)


def gpus_here() -> tuple[Device, ...]:
    """The NVIDIA GPUs that a job started here would see; none where their driver can't be asked."""
    try:
        return devices_here()
    except HardwareNotHere:
        return ()


def machine_memory_bytes() -> int:
    """The memory that processes started here can have together: the machine's, or less where a cgroup says so."""
    import psutil

    limits = [int(psutil.virtual_memory().total), *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    return min(limits)


def processor() -> str:
    """What a CPU calls itself, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _cpu(count: int) -> Hardware:
    cores = os.cpu_count() or 1
    if count > max(cores, 2):
        raise BadInput(f"{count} CPU ranks were asked for on {cores} cores.", way_out=f"Ask for at most {max(cores, 2)}xcpu.")
    return Hardware(kind="cpu", name="cpu", count=count, memory_bytes=machine_memory_bytes(), here=True)


def _local(count: int | None, devices: tuple[Device, ...]) -> Hardware:
    if not devices:
        return _cpu(count or 1)
    if len(devices) > 1 and any(device.slice_of for device in devices):
        raise BadInput(
            "GPUs of this machine are cut into slices by MIG, and a job sees one slice only.", way_out=_choices(devices, "uuid")
        )
    if len({device.name for device in devices}) > 1:
        names = ", ".join(sorted({device.name for device in devices}))
        raise BadInput(f"This machine's GPUs differ ({names}).", way_out=_choices(devices, "index"))
    if count is not None and count > len(devices):
        raise BadInput(f"{count} GPUs were asked for and {len(devices)} are here.", way_out=f"Type --gpus {len(devices)}xlocal.")
    gpu = recognise(devices[0])
    memory = min(device.memory_bytes for device in devices)
    name = gpu.name if gpu else devices[0].name
    return Hardware(kind="cuda", name=name, count=count or len(devices), memory_bytes=memory, here=True)


def _named(count: int, gpu: catalogue.Gpu, devices: tuple[Device, ...]) -> Hardware:
    """The named GPUs; they are here only if all of them are, and then they must be the ones that a job would take."""
    alike = [device for device in devices if recognise(device) == gpu]
    memory = min((device.memory_bytes for device in alike), default=gpu.memory_bytes)
    here = gpu.probes and count <= len(alike)
    if here and any(recognise(device) != gpu for device in devices[:count]):
        first = ", ".join(device.name for device in devices[:count])
        raise BadInput(
            f"A job of {count}x{gpu.name} would get other GPUs here ({first}).", way_out=_choices(tuple(alike), "index")
        )
    return Hardware(kind="cuda", name=gpu.name, count=count, memory_bytes=memory, here=here)


def _choices(devices: tuple[Device, ...], by: str) -> str:
    """What CUDA_VISIBLE_DEVICES may be set to, one choice for each kind of device."""
    kinds: dict[str, list[Device]] = {}
    for device in devices:
        words = device.name if by == "index" else f"{device.name}, {format_bytes(device.memory_bytes)}, {device.uuid}"
        kinds.setdefault(words, []).append(device)
    shown = [f"{VISIBLE}={','.join(str(getattr(one, by)) for one in alike)} ({words})" for words, alike in kinds.items()]
    return f"Pick with {' or '.join(shown)}."


def _plain(name: str) -> str:
    return re.sub(r"(?<=\d)gb\b", "g", re.sub(r"[\s_-]", "", name.lower())).removeprefix("nvidia")


def _has_words(text: str, words: str) -> bool:
    """Whole words, and not those of a faster or slower sister: an RTX 4070 Ti is no RTX 4070."""
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])(?!\s+(?:ti|super|d)\b)", text) is not None


def _cgroup_limits(own: Path, root: Path) -> list[int]:
    """Limits of our cgroup and of those around it, v1 and v2."""
    limits = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places, file = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            places, file = [root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        limits += [limit for place in places for limit in _limits_upwards(place, path, file)]
    return limits


def _limits_upwards(place: Path, path: str, file: str) -> list[int]:
    folder = place / path.lstrip("/")
    limits = []
    while True:
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            text = ""
        # v1 writes "no limit" as a number near 2^63.
        if text.isdigit() and 0 < int(text) < 2**60:
            limits.append(int(text))
        if folder == place or place not in folder.parents:
            return limits
        folder = folder.parent
