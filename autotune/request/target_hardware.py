"""Hardware of a request: the GPUs that --gpus names, the memory limit, and how they are judged."""

from __future__ import annotations

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.core.job import Hardware, Mode
from autotune.core.units import format_bytes, parse_bytes
from autotune.emulator.cards import emulated_machine
from autotune.frameworks.base import Trainer
from autotune.machine import hardware_detection
from autotune.request.flags import Flags


def target_hardware(flags: Flags) -> Hardware:
    if flags.mode == "emulate":  # one probe runs at a time: the host's cores are shared by all emulated GPUs
        if flags.executor != "local":
            raise BadInput("GPUs are emulated on this machine, and not on a cluster.", way_out="Leave --executor out.")
        if flags.slots is not None and flags.slots > 1:
            raise BadInput("One probe at a time runs on emulated GPUs.", way_out="Leave --slots out.")
        cards = emulated_machine(flags.gpus).cards
        name, memory_bytes = cards[0].gpu.name, cards[0].gpu.memory_bytes
        return Hardware(kind="cuda", name=name, count=len(cards), memory_bytes=memory_bytes, here=True, emulated=True)
    hardware = hardware_detection.hardware(flags.gpus) if flags.executor == "local" else hardware_detection.elsewhere(flags.gpus)
    if flags.mode != "probe":
        return hardware
    if not hardware_detection.can_be_probed(hardware):
        raise HardwareNotHere(
            f"{hardware} is no NVIDIA GPU, and probes support no other kind.", way_out="Leave --mode out for a prediction."
        )
    if not hardware.here:
        local = hardware_detection.hardware("local")
        found = "no NVIDIA GPU" if local.kind == "cpu" else str(local)
        raise HardwareNotHere(
            f"{hardware} is not on this machine, which has {found}, so it can't be measured here.",
            way_out="Run this command on the machine that has it, type --gpus local, or leave --mode out for a prediction.",
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
        what = "this machine's memory" if hardware.memory_is_shared else f"the memory of one {hardware.name}"
        have = format_bytes(hardware.memory_bytes)
        raise BadInput(
            f"--memory-limit {flags.memory_limit} is above {what}, {have}.", way_out=f"Give at most {have}, or leave it out."
        )
    return limit
