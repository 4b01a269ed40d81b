"""From what the GPUs showed to what a Measurement says about them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune import failures
from autotune.measurement import DeviceMemory, TorchMemory
from autotune.rig.device_meter import DevicePeaks
from autotune.rig.gpus import Gpus, Slot
from autotune.rig.neighbours import in_words, named
from autotune.units import MIB, format_bytes

TAKEN_BYTES = 256 * MIB
"""Others that took so much while a probe ran may be the reason why it had too little."""

UNLISTED = "NVML lists none of the probe's processes here"
UNSEEN_PEAK = "torch's figures mislead under vLLM's sleep mode"


def device_memories(
    gpus: Gpus, peaks: Mapping[str, DevicePeaks], by_rank: Mapping[int, Mapping[str, Any]]
) -> tuple[DeviceMemory, ...]:
    """One for each GPU: what was sampled outside, lifted to torch's own peak, which no sampling misses."""
    return tuple(_memory(gpus, slot, peaks.get(slot.visible), by_rank.get(slot.number, {})) for slot in gpus.slots)


def together(load: Sequence[DeviceMemory], now: Sequence[DeviceMemory]) -> tuple[DeviceMemory, ...]:
    """The higher figures of a load and of what ran after it: a real run loads as well."""
    return tuple(_higher(first, second) for first, second in zip(load, now, strict=True)) if load else tuple(now)


def worst_peak(devices: Iterable[DeviceMemory]) -> int | None:
    """The worst device's peak; None where one of them is not known."""
    peaks = [device.peak_bytes for device in devices]
    return None if None in peaks else _max(*peaks)


def worst_phases(devices: Iterable[DeviceMemory]) -> dict[str, int]:
    """By phase, the worst device's peak."""
    phases: dict[str, int] = {}
    for device in devices:
        phases = _by_phase(phases, device.phase_peak_bytes)
    return phases


def torch_by_phase(bodies: Iterable[Mapping[str, Any]]) -> dict[str, TorchMemory]:
    """Over all ranks: the worst one's peaks, everybody's counts."""
    found: dict[str, TorchMemory] = {}
    for body in bodies:
        for phase, figures in (body.get("torch_by_phase") or {}).items():
            found[phase] = _add(found.get(phase), TorchMemory(**figures))
    return found


def taken_meanwhile(gpus: Gpus, peaks: Mapping[str, DevicePeaks]) -> str | None:
    """Who took memory of the GPUs while the probe ran, in a sentence; None where nobody did, or nobody can tell."""
    for slot in gpus.slots:
        seen = peaks.get(slot.visible)
        grown = {pid: growth for pid, growth in (seen.newcomers if seen else {}).items() if growth >= TAKEN_BYTES}
        if grown:
            who = named(in_words(grown, gpus.nvml))
            return (
                f"{slot.words} was taken by others while a probe ran ({who}): that it ran out says nothing about the candidate."
            )
    return None


def on_another_device(gpus: Gpus, by_rank: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Where a rank ran on another GPU than the one that was watched; None where all is well."""
    for slot in gpus.slots:
        said = by_rank.get(slot.number, {}).get("device_uuid")
        if said is not None and slot.device is not None and slot.device.slice_of is None and said != slot.visible:
            return f"Rank {slot.number} ran on {said}, and {slot.visible} was watched: set CUDA_DEVICE_ORDER=PCI_BUS_ID."
    return None


def caveats(gpus: Gpus) -> tuple[str, ...]:
    """What narrows the meaning of figures that these GPUs gave, a sentence each."""
    found = []
    limit = format_bytes(gpus.limit_bytes)
    first = gpus.slots[0]
    name = first.device.name if first.device else "the GPUs here"
    if any(slot.ballast for slot in gpus.slots):
        found.append(
            f"measured on {name}, of which all but {limit} was held back: what fits here fits a card of {limit}, "
            "but the speeds are this GPU's and not that card's"
        )
    elif "torch" in gpus.bound_by:
        found.append(f"only torch's allocator was held to {limit}: NCCL and an engine that sleeps were not")
    if gpus.effective_limit_bytes < gpus.limit_bytes:
        found.append(f"others hold memory of the GPUs: {format_bytes(gpus.effective_limit_bytes)} of {limit} were left")
    if gpus.nvml is None:
        found.append(f"memory is what torch and CUDA told each rank, because NVML was not asked ({gpus.why_not})")
    return tuple(found)


def without_neighbours(said: Any) -> Any:
    """The same words without torch's list of who else is on the GPU: those were there before, and are no news."""
    if isinstance(said, str):
        return failures.without_neighbours(said)
    if isinstance(said, dict):
        return {name: without_neighbours(value) for name, value in said.items()}
    return [without_neighbours(value) for value in said] if isinstance(said, list) else said


def _memory(gpus: Gpus, slot: Slot, seen: DevicePeaks | None, body: Mapping[str, Any]) -> DeviceMemory:
    device, told = slot.device, _told(body)
    shared = DeviceMemory(
        index=slot.number if device is None or device.index is None else device.index,
        uuid=device.uuid if device else None, name=device.name if device else None,
        peak_bytes=told[0], phase_peak_bytes=told[1], measured_by="torch", why=gpus.why_not,
        others_bytes=slot.others_bytes, others=slot.others_in_words(gpus.nvml), ballast_bytes=slot.ballast_bytes,
    )  # fmt: skip
    if seen is None:
        misled = body.get("torch_reserved_why") is not None
        return replace(shared, peak_bytes=None, phase_peak_bytes={}, why=f"{gpus.why_not}; {UNSEEN_PEAK}") if misled else shared
    by_list = seen.why is None and seen.listed_peak_bytes is not None
    # Where others took some meanwhile, a rank's own figure has that in it.
    own, phases = (None, {}) if seen.newcomers else told
    return replace(
        shared,
        peak_bytes=max(seen.peak_bytes, own or 0),
        phase_peak_bytes=_by_phase(seen.phase_peak_bytes, phases),
        measured_by="nvml-processes" if by_list else "nvml-device",
        why=None if by_list else seen.why or UNLISTED,
        processes_peak_bytes=seen.listed_peak_bytes if by_list else None,
    )


def _told(body: Mapping[str, Any]) -> tuple[int | None, Mapping[str, int]]:
    """A rank's own peak, over all and by phase."""
    return body.get("peak_bytes"), body.get("phase_peak_bytes") or {}


def _higher(first: DeviceMemory, second: DeviceMemory) -> DeviceMemory:
    return replace(
        second,
        # What the load took says nothing about a run whose peak is not known.
        peak_bytes=None if second.peak_bytes is None else _max(first.peak_bytes, second.peak_bytes),
        phase_peak_bytes=_by_phase(first.phase_peak_bytes, second.phase_peak_bytes),
        processes_peak_bytes=_max(first.processes_peak_bytes, second.processes_peak_bytes),
    )


def _max(*figures: int | None) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _by_phase(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {phase: max(one.get(phase, 0), other.get(phase, 0)) for phase in (*one, *(set(other) - set(one)))}


def _add(one: TorchMemory | None, other: TorchMemory) -> TorchMemory:
    if one is None:
        return other
    known = one.reserved_bytes is not None and other.reserved_bytes is not None
    return TorchMemory(
        allocated_bytes=max(one.allocated_bytes, other.allocated_bytes),
        reserved_bytes=max(one.reserved_bytes or 0, other.reserved_bytes or 0) if known else None,
        retries=one.retries + other.retries,
        out_of_memory=one.out_of_memory + other.out_of_memory,
    )
