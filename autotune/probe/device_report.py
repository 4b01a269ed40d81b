"""Samples of the GPUs and figures of the ranks -> DeviceMemory, with caveats; notes about the
GPUs before any measurement.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.errors import ProbeError
from autotune.core.job import Hardware
from autotune.core.measurement import DeviceMemory, TorchMemory, highest, highest_by_phase
from autotune.core.units import MIB, format_bytes
from autotune.failures import numbers
from autotune.machine.nvml import VISIBLE, GpuLost, NvmlNotSupported, in_words, listed
from autotune.probe.ballast import needs_ballast
from autotune.probe.device_meter import DevicePeaks
from autotune.probe.gpu_set import Gpus, GpuSlot
from autotune.probe.message_validation import RankResult

# Growth of other processes during a probe that may have caused its lack of memory.
MIN_TAKEN_BYTES = 256 * MIB
UNLISTED = "NVML lists none of the probe's processes here"
UNSEEN_PEAK = "torch's figures mislead under vLLM's sleep mode"


def device_memories(
    gpus: Gpus,
    peaks: Mapping[str, DevicePeaks],
    by_rank: Mapping[int, RankResult],
) -> tuple[DeviceMemory, ...]:
    """Return one entry per GPU: peak = max(sampled peak, torch's peak), as samples miss peaks."""
    memories = []
    for slot in gpus.slots:
        result = by_rank.get(slot.number, RankResult())
        memories.append(_memory(gpus, slot, peaks.get(slot.visible), result))
    return tuple(memories)


def higher_of_each(
    load: Sequence[DeviceMemory], now: Sequence[DeviceMemory]
) -> tuple[DeviceMemory, ...]:
    """Return the higher figures of a load and of the command after it: a real run loads too."""
    if not load:
        return tuple(now)
    return tuple(_higher(first, second) for first, second in zip(load, now, strict=True))


def _higher(load: DeviceMemory, now: DeviceMemory) -> DeviceMemory:
    # The load's peak is no bound for a command with an unknown peak.
    peak_bytes = None
    if now.peak_bytes is not None:
        peak_bytes = highest((load.peak_bytes, now.peak_bytes))
    return replace(
        now,
        peak_bytes=peak_bytes,
        phase_peak_bytes=_by_phase(load.phase_peak_bytes, now.phase_peak_bytes),
        processes_peak_bytes=highest((load.processes_peak_bytes, now.processes_peak_bytes)),
    )


def worst_peak(devices: Iterable[DeviceMemory]) -> int | None:
    """Return the worst device's peak; None where any is unknown."""
    return _worst([device.peak_bytes for device in devices])


def _worst(figures: Sequence[int | None]) -> int | None:
    if None in figures:
        return None
    return highest(figures)


def worst_phases(devices: Sequence[DeviceMemory]) -> dict[str, int]:
    """Return the worst device's peak by phase; phases in which none was used are absent."""
    return {phase: peak for phase, peak in highest_by_phase(devices).items() if peak}


def torch_by_phase(results: Iterable[RankResult]) -> dict[str, TorchMemory]:
    """Merge torch's figures over ranks: max of the peaks, sum of the counts."""
    by_phase: dict[str, list[TorchMemory]] = {}
    for result in results:
        for phase, memory in (result.torch_by_phase or {}).items():
            by_phase.setdefault(phase, []).append(memory)
    return {phase: _merged_torch(memories) for phase, memories in by_phase.items()}


def _merged_torch(memories: Sequence[TorchMemory]) -> TorchMemory:
    return TorchMemory(
        allocated_bytes=max(memory.allocated_bytes for memory in memories),
        reserved_bytes=_worst([memory.reserved_bytes for memory in memories]),
        retries=sum(memory.retries for memory in memories),
        out_of_memory=sum(memory.out_of_memory for memory in memories),
    )


def taken_meanwhile(gpus: Gpus, peaks: Mapping[str, DevicePeaks]) -> str | None:
    """Describe other processes that took memory during the probe; None if none is visible."""
    for slot in gpus.slots:
        sampled = peaks.get(slot.visible)
        grown = {} if sampled is None else sampled.newcomers
        if sum(grown.values()) >= MIN_TAKEN_BYTES:
            processes = listed(in_words(grown, gpus.nvml))
            return (
                f"{slot.label} was taken by others while a probe ran ({processes}): the"
                " out-of-memory error is void."
            )
    return None


def on_another_device(gpus: Gpus, by_rank: Mapping[int, RankResult]) -> str | None:
    """Describe a rank that ran on another GPU than the metered one; None where there is none."""
    for slot in gpus.slots:
        used = by_rank.get(slot.number, RankResult()).device_uuid
        if (
            used is not None
            and slot.device is not None
            and slot.device.slice_of is None
            and used != slot.visible
        ):
            return (
                f"Rank {slot.number} ran on {used}, but {slot.visible} was metered. Set"
                " CUDA_DEVICE_ORDER=PCI_BUS_ID."
            )
    return None


def caveats(gpus: Gpus) -> tuple[str, ...]:
    """Describe the limits of figures that were measured on these GPUs, one phrase each."""
    phrases = []
    limit = format_bytes(gpus.limit_bytes)
    first = gpus.slots[0]
    name = first.device.name if first.device else "the GPUs here"
    if any(slot.ballast for slot in gpus.slots):
        phrases.append(
            f"measured on {name}, of which all but {limit} was held back: what fits here fits a"
            f" card of {limit}, but the speeds are this GPU's and not that card's"
        )
    elif "torch" in gpus.bound_by:
        phrases.append(
            f"only torch's allocator was held to {limit}: NCCL and an engine in sleep mode were not"
        )
    if gpus.effective_limit_bytes < gpus.limit_bytes:
        phrases.append(
            f"others hold memory of the GPUs: {format_bytes(gpus.effective_limit_bytes)} of {limit}"
            " were left"
        )
    if gpus.nvml is None:
        phrases.append(
            "memory is what torch and CUDA reported to each rank: NVML was not in use"
            f" ({gpus.why_not})"
        )
    return tuple(phrases)


def without_neighbours(text: Any) -> Any:
    """Remove torch's list of other processes from a message: they were present before the probe."""
    if isinstance(text, str):
        return numbers.without_neighbours(text)
    if isinstance(text, dict):
        return {name: without_neighbours(value) for name, value in text.items()}
    if isinstance(text, list):
        return [without_neighbours(value) for value in text]
    return text


def _memory(
    gpus: Gpus,
    slot: GpuSlot,
    sampled: DevicePeaks | None,
    result: RankResult,
) -> DeviceMemory:
    if sampled is None:
        return _by_torch(gpus, slot, result)
    # 1. The rank's own figures, as far as they are no one else's.
    own_peak = result.peak_bytes
    own_phases = _phase_peaks(result)
    if sampled.newcomers:  # the rank's own figure (total - free) would include their memory
        own_peak = None
        own_phases = {}

    # 2. torch's: others that left hide growth of the probe from every difference, and torch counts
    # it alone.
    torch_phases: dict[str, int] = {}
    for phase, memory in (result.torch_by_phase or {}).items():
        torch_phases[phase] = memory.reserved_bytes or 0
    own_phases = _by_phase(own_phases, torch_phases)
    own_peak = max(
        own_peak or 0,
        result.torch_reserved_bytes or 0,
        sampled.listed_peak_bytes or 0,
    )

    # 3. The device, as it was sampled.
    figures = replace(
        _identity(gpus, slot),
        peak_bytes=max(sampled.peak_bytes, own_peak),
        phase_peak_bytes=_by_phase(sampled.phase_peak_bytes, own_phases),
        measured_by="nvml-device",
        why=sampled.why or UNLISTED,
    )
    if sampled.why is None and sampled.listed_peak_bytes is not None:
        return replace(
            figures,
            measured_by="nvml-processes",
            why=None,
            processes_peak_bytes=sampled.listed_peak_bytes,
        )
    return figures


def _by_torch(
    gpus: Gpus,
    slot: GpuSlot,
    result: RankResult,
) -> DeviceMemory:
    """Return the rank's own figures, where NVML samples nothing."""
    identity = _identity(gpus, slot)
    if result.torch_reserved_why is not None:
        return replace(identity, why=f"{gpus.why_not}; {UNSEEN_PEAK}")
    return replace(
        identity,
        peak_bytes=result.peak_bytes,
        phase_peak_bytes=_phase_peaks(result),
    )


def _phase_peaks(result: RankResult) -> dict[str, int]:
    return {str(phase): peak for phase, peak in (result.phase_peak_bytes or {}).items()}


def _identity(gpus: Gpus, slot: GpuSlot) -> DeviceMemory:
    """Return what is known of a GPU without its peaks."""
    device = slot.device
    return DeviceMemory(
        index=slot.number if device is None or device.index is None else device.index,
        uuid=device.uuid if device else None,
        name=device.name if device else None,
        peak_bytes=None,
        phase_peak_bytes={},
        measured_by="torch",
        why=gpus.why_not,
        others_bytes=slot.others_bytes,
        others=slot.others_in_words(gpus.nvml),
        ballast_bytes=slot.ballast_bytes,
    )


def _by_phase(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the higher peak of each phase."""
    higher = dict(first)
    for phase, peak in second.items():
        higher[phase] = max(peak, first.get(phase, 0))
    return higher


def gpu_notes(
    hardware: Hardware,
    limit_bytes: int,
    *,
    library: object = None,
) -> tuple[str, ...]:
    """Describe other processes on the GPUs, and the enforcement of a limit below their size."""
    if hardware.kind != "cuda" or not hardware.here:
        return ()
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable), library=library)
    except ProbeError as error:
        return (str(error),)
    with contextlib.closing(gpus):
        # GPUs that NVML counts and that cannot be used, as far as the user chose them.
        notes = []
        if gpus.nvml is not None:
            chosen = os.environ.get(VISIBLE, "").replace(" ", "").split(",")
            for index, reason in gpus.nvml.unreadable.items():
                if VISIBLE not in os.environ or str(index) in chosen:
                    notes.append(f"GPU {index} is left out: {reason}")
        notes += _others(gpus)
        notes += _limit(gpus, hardware)
        if gpus.nvml is None:
            notes.append(
                f"NVML is not in use ({gpus.why_not}): memory is what torch and CUDA report to each"
                " rank, and other processes are not visible"
            )
        return tuple(notes)


def held_by_others(hardware: Hardware, limit_bytes: int) -> tuple[int, ...] | None:
    """Return the bytes of other processes by GPU, 0 below MIN_REPORTED_BYTES; None: unknown."""
    try:
        gpus = Gpus(hardware.count, limit_bytes, Path(sys.executable))
    except ProbeError:
        return None
    with contextlib.closing(gpus), contextlib.suppress(NvmlNotSupported, GpuLost):
        gpus.look()  # without NVML it reads nothing, and every figure below is None
        sizes = []
        for slot in gpus.slots:
            if slot.others_bytes is None:
                return None
            sizes.append(slot.others_bytes)
        return tuple(sizes)
    return None


def _others(gpus: Gpus) -> list[str]:
    try:
        gpus.look()
    except (NvmlNotSupported, GpuLost) as error:
        return [f"a GPU can't be read: {error}"]
    notes = []
    for slot in gpus.slots:
        if not slot.others_bytes:
            continue
        processes = listed(slot.others_in_words(gpus.nvml))
        note = f"others hold {format_bytes(slot.others_bytes)} of {slot.label} ({processes})"
        room_bytes = (slot.total_bytes or 0) - slot.others_bytes
        if room_bytes < gpus.limit_bytes:
            note += f": the limit there is {format_bytes(room_bytes)}"
        notes.append(note)
    return notes


def _limit(gpus: Gpus, hardware: Hardware) -> list[str]:
    if not needs_ballast(gpus.limit_bytes, hardware.memory_bytes):
        return []
    limit = format_bytes(gpus.limit_bytes)
    name = hardware.name
    if any(slot.exclusive for slot in gpus.slots):
        return [
            (
                "these GPUs serve one process at a time, so no ballast can hold the memory beyond"
                f" {limit}: torch's allocator is capped, NCCL and an engine in sleep mode are not;"
                " `nvidia-smi -c DEFAULT` lifts that"
            )
        ]
    return [
        (
            f"all but {limit} of each {name} is held back: what fits here fits a card of {limit}; "
            f"speeds are those of {name}, and so are the workspaces of its kernels"
        )
    ]
