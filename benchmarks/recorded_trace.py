"""A process's memory history as a `Trace`: what torch recorded of a framework's own step.

    allocation      the n-th `alloc` event; its size is the requested one
    free            `free_requested`; where torch waits for another stream until `free_completed`,
                    the block returns then
    emptied cache   a `segment_free`: before the next allocation
    phase           the metadata that `recording/sitecustomize.py` sets
    part            by lifetime, since no frames are recorded (`_part`)

A step ends where the optimizer allocates; later steps, in which it does not, are one.

A record has no work in FLOPs, no layers and one number of ranks: those of its run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from autotune.core.measurement import Phase
from autotune.core.trace import Inventory, Mark, Part, Trace

PHASES: Mapping[str, Phase] = {
    "load": "load",
    "engine start": "load",
    "rollout": "rollout",
    "weight sync": "sync",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""Phase of the emulator's hooks -> phase of a trace."""

AUTOGRAD = "backward"
"""Phase of events without metadata after loading. It belongs to a thread: autograd's own thread has
none, nor have those that load weights.
"""

PART_NAMES: tuple[Part, ...] = get_args(Part)
NEVER = (10**9, "end")  # when an allocation that stays is freed


@dataclass
class _Step:
    """What was read of a record so far."""

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)
    emptied: list[int] = field(default_factory=list)
    born_in: list[tuple[int, str]] = field(default_factory=list)  # step and phase by allocation
    freed_in: dict[int, tuple[int, str]] = field(default_factory=dict)


def trace_of(
    record: Mapping[str, Any],
    steps: int = 2,
) -> Trace:
    """Return the loading and the first optimizer steps of a record."""
    step = _read(record["events"], steps)
    _order_weights(step)
    parts = [_part(step, number) for number in range(len(step.sizes))]
    return Trace(
        basis="traced",
        versions={"torch": record["torch"]},
        device="cuda",
        layers=0,
        sizes=tuple(step.sizes),
        parts=tuple(PART_NAMES.index(part) for part in parts),
        part_names=PART_NAMES,
        events=tuple(step.events),
        marks=tuple(step.marks),
        work=(),
        inventory=_inventory(step, parts),
        streams=step.streams,
        returns=step.returns,
        emptied=tuple(step.emptied),
    )


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all processes, the most events first."""
    records = []
    for path in folder.glob("*.record"):
        records.append(json.loads(path.read_text()))
    return sorted(records, key=lambda record: -len(record["events"]))


def _read(
    events: Sequence[Sequence[Any]],
    steps: int,
) -> _Step:
    step = _Step()
    number_at: dict[int, int] = {}  # address -> live allocation
    waiting: dict[int, int] = {}  # address -> allocation freed while another stream reads it
    stream_numbers = {0: 0}
    optimizer_steps = 0
    was_emptied = False
    phase: Phase = "load"
    for action, address, size, stream, label in events:
        # 1. The phase. An optimizer step ends with the next phase.
        if not label and phase != "load":
            label = AUTOGRAD
        next_phase = PHASES.get(label, phase)
        if phase == "optimizer" and next_phase != "optimizer":
            optimizer_steps += 1
        if optimizer_steps == steps:
            break
        if next_phase != phase or not step.marks:
            phase = next_phase
            _mark(step, phase, optimizer_steps)

        # 2. The event.
        if action == "segment_free":
            was_emptied = True
        elif action == "alloc":
            number = len(step.sizes)
            if was_emptied:
                was_emptied = False
                step.emptied.append(number)
                _mark(step, phase, optimizer_steps)
            number_at[address] = number
            step.sizes.append(size)
            step.born_in.append((optimizer_steps, phase))
            step.events.append(number + 1)
            stream_number = stream_numbers.setdefault(stream, len(stream_numbers))
            if stream_number:
                step.streams[number] = stream_number
        elif action == "free_requested" and address in number_at:
            number = number_at.pop(address)
            waiting[address] = number
            step.freed_in[number] = (optimizer_steps, phase)
            step.events.append(-(number + 1))
        elif action == "free_completed" and address in waiting:
            number = waiting.pop(address)
            if step.events[-1] != -(number + 1):
                step.returns[number] = len(step.sizes)
    return step


def _order_weights(step: _Step) -> None:
    """Sort the sizes of what stays from loading on: threads load weights in any order."""
    weights = []
    for number, (_, phase) in enumerate(step.born_in):
        if phase == "load" and number not in step.freed_in:
            weights.append(number)
    sizes = sorted(step.sizes[number] for number in weights)
    for number, size in zip(weights, sizes, strict=True):
        step.sizes[number] = size


def _mark(
    step: _Step,
    phase: Phase,
    optimizer_step: int,
) -> None:
    """Begin a stretch; one without events is replaced."""
    if step.marks and step.marks[-1].event == len(step.events):
        step.marks.pop()
    step.marks.append(
        Mark(
            event=len(step.events),
            phase=phase,
            step=optimizer_step,
        )
    )


def _part(
    step: _Step,
    number: int,
) -> Part:
    """Return the part by lifetime: weights stay from loading on, the optimizer's state from its
    step on; gradients are made in the backward pass and outlive it.
    """
    first_step, first_phase = step.born_in[number]
    last_step, last_phase = step.freed_in.get(number, NEVER)
    if first_phase == "load":
        return "workspaces" if last_phase == "load" else "weights"
    if first_phase == "optimizer" and last_step > first_step + 1:
        return "optimizer"
    outlives_pass = last_phase == "optimizer" or last_step > first_step
    if first_phase == "backward" and outlives_pass:
        return "gradients"
    return "activations"


def _inventory(
    step: _Step,
    parts: Sequence[Part],
) -> Inventory:
    weights = [size for size, part in zip(step.sizes, parts, strict=True) if part == "weights"]
    weight_bytes = sum(weights)
    return Inventory(
        parameters=weight_bytes // 2,
        trainable_parameters=weight_bytes // 2,
        weight_bytes=weight_bytes,
        trainable_bytes=weight_bytes,
        layer_bytes=(),
        layer_trainable=(),
        largest_parameter=max(weights, default=0) // 2,
    )
