"""Trace: every allocation of a training step that ran on tensors without memory, in order.

The training environment's side (`inside/tracing`) makes it; prediction replays it. Sizes are the bytes that the framework
asked for; what an allocator makes of them is prediction's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from autotune.measurement import Phase

Part = Literal[
    "weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspaces", "inputs", "kv_cache", "communication"
]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """From this event on, the step is here."""

    event: int
    """Index of the first event that belongs to it."""

    phase: Phase
    step: int
    """Optimizer step, from 0. Adam's state exists from the end of step 0 on."""

    layer: int | None = None
    """The decoder layer that runs; None before the first, after the last and where layers are not told apart."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one phase of the last step computes, on one rank."""

    phase: Phase
    flops: Mapping[str, float]
    """Floating-point operations of matrix products and attention, by the dtype they run in: `bfloat16`, `float32` ..."""

    moved_bytes: float
    """Bytes read and written by all operations, each operation's operands once."""

    kernels: int
    """How many operations launch something on a device."""

    in_layers: Mapping[str, float] = field(default_factory=dict)
    """How much of all that is done inside decoder layers: `moved_bytes`, `kernels`, and the operations of each dtype."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The model's parameters, as the trainer left them, on one rank and unsharded."""

    parameters: int
    trainable_parameters: int
    weight_bytes: int
    """All parameters and buffers, adapters among them."""

    trainable_bytes: int
    layer_bytes: tuple[int, ...]
    """Parameters of each decoder layer; what is missing to `weight_bytes` is outside the layers."""

    layer_trainable: tuple[int, ...]
    """Trainable parameters (a count) of each decoder layer."""

    largest_parameter: int
    """Count of the largest single parameter: what a gather of one at a time needs room for."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the model, unsharded."""

    count: int
    size: int
    """Bytes."""

    trains: bool
    layer: int | None
    """The decoder layer it belongs to; None outside the layers."""

    number: int | None
    """The allocation that holds it; None where it shares one that is not its own."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """When parameters are needed and gradients are ready: what every kind of sharding hangs on."""

    parameters: tuple[Parameter, ...]
    modules: tuple[tuple[int, ...], ...]
    """For each module, the indices of the parameters that it holds itself; none for most."""

    uses: tuple[tuple[int, ...], ...]
    """(events before it, what, which), in order. What: 0 a pass of the whole model begins; 1 and 2 a module's forward begins
    and ends, 3 and 4 its backward; 5 a parameter's gradient is ready, with the number of the gradient's allocation as a
    fourth entry; 6 a parameter is looked at by another module than the one that holds it."""

    keeps_recomputed: bool = False
    """Whether checkpointing keeps what it computes again beside the graph (`use_reentrant` false), weights among it."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's step."""

    schema: Literal[1] = 1
    basis: Literal["traced", "generic"]
    versions: Mapping[str, str]
    device: Literal["cpu", "cuda"]
    """Whose kernels and defaults the step was made to follow."""

    layers: int
    """Decoder layers that were traced: fewer than the model has when it was asked so."""

    sizes: tuple[int, ...]
    """Bytes of every allocation, by its number."""

    parts: tuple[int, ...]
    """What each allocation is, as an index into `part_names`."""

    part_names: tuple[Part, ...]
    events: tuple[int, ...]
    """n+1 where allocation n is made, -(n+1) where it is given back."""

    marks: tuple[Mark, ...]
    """In the order of their events; the first is at event 0."""

    work: tuple[Work, ...]
    inventory: Inventory
    streams: Mapping[int, int] = field(default_factory=dict)
    """Of allocations that are made on another stream than the computation's, by their number: which one, from 1."""

    returns: Mapping[int, int] = field(default_factory=dict)
    """Of allocations that another stream still reads when they are given back: the allocation before which their block is
    free again."""

    notes: tuple[str, ...] = ()
    """What the step could not follow exactly and stood in for, in words for the reader."""

    high_extra_bytes: int = 0
    """How much more the peak could be where data decide (experts' imbalance); 0 where nothing does."""

    effective: Mapping[str, object] = field(default_factory=dict)
    """Settings as the trainer itself reports them."""

    usage: Usage | None = None
    """None where the question's sharding does not ask for it."""

    seconds: float = 0.0
    """What tracing took."""

    @property
    def peak_bytes(self) -> int:
        """torch's own peak of requested bytes."""
        live = peak = 0
        for event in self.events:
            live += self.sizes[event - 1] if event > 0 else -self.sizes[-event - 1]
            peak = max(peak, live)
        return peak

    def stretches(self) -> Iterator[tuple[Mark, range]]:
        """Each mark with the range of its events."""
        ends = [mark.event for mark in self.marks[1:]] + [len(self.events)]
        for mark, end in zip(self.marks, ends, strict=True):
            yield mark, range(mark.event, end)

    def live_parts_at(self, event: int) -> dict[Part, int]:
        """Bytes by part right after this event."""
        live: Counter[Part] = Counter()
        for entry in self.events[: event + 1]:
            number = abs(entry) - 1
            live[self.part_names[self.parts[number]]] += self.sizes[number] if entry > 0 else -self.sizes[number]
        return {part: held for part, held in live.items() if held}

    @cached_property
    def last_step(self) -> tuple[Phase, ...]:
        """The phases of its stretches, in order. Every candidate with this trace asks for them several times."""
        last = max((mark.step for mark in self.marks), default=0)
        return tuple(mark.phase for mark in self.marks if mark.step == last)
