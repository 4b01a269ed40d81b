"""A trace written anew: what a sharding library adds, takes away and moves, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from autotune.trace import Mark, Part, Trace, Usage

PASS, FORWARD, FORWARD_DONE, BACKWARD, BACKWARD_DONE, GRADIENT, READ = range(7)
_ENDINGS = (FORWARD_DONE, BACKWARD_DONE, GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What the plain optimizer took, so that it can be asked for other tensors."""

    state_copies: float | None
    """Tensors of a parameter's size and dtype that it keeps; None where its state has a dtype of its own."""

    state_bytes_per_count: float
    """Of one element, where the state has a dtype of its own."""

    temporary_copies: int
    """Tensors of the size of what is updated at once, beside it; 0 for fused kernels."""

    listed: bool
    """Whether all parameters are updated at once (foreach) rather than one by one."""

    def state_bytes(self, count: int, width: int) -> int:
        """For this many elements of masters of this width."""
        return round(count * (self.state_bytes_per_count if self.state_copies is None else self.state_copies * width))

    def state_tensors(self, count: int, width: int) -> list[int]:
        """The same, tensor by tensor where they are like the parameter."""
        whole = self.state_bytes(count, width)
        copies = 0 if self.state_copies is None else round(self.state_copies)
        alike = [count * width] * copies
        return [*alike, whole - sum(alike)] if copies and whole > sum(alike) else alike or [whole]


class Writer:
    """The new trace, while it grows."""

    def __init__(self, trace: Trace) -> None:
        self._old = trace
        self.sizes = list(trace.sizes)
        self.parts = list(trace.parts)
        self.part_names = list(trace.part_names)
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.streams: dict[int, int] = {}
        self._returned: list[tuple[int, list[int]]] = []

    def allocate(self, size: int, part: Part, stream: int = 0) -> int:
        """A block; a size of nothing is a block of nothing, so that callers need not ask."""
        if stream:
            self.streams[len(self.sizes)] = stream
        self.sizes.append(max(0, size))
        self.parts.append(self._part(part))
        self.events.append(len(self.sizes))
        return len(self.sizes) - 1

    def free(self, number: int | None) -> None:
        if number is not None:
            self.events.append(-(number + 1))

    def take_back(self, event: int) -> None:
        """As if it had not been written."""
        del self.events[event]
        self.marks = [replace(mark, event=mark.event - (mark.event > event)) for mark in self.marks]
        self._returned = [(at - (at > event), numbers) for at, numbers in self._returned]

    def returned(self, numbers: list[int]) -> None:
        """From here on these, which were freed before, are free on their own streams, too."""
        if numbers:
            self._returned.append((len(self.events), numbers))

    def passing(self, size: int, part: Part) -> None:
        self.free(self.allocate(size, part))

    def _part(self, part: Part) -> int:
        if part not in self.part_names:
            self.part_names.append(part)
        return self.part_names.index(part)

    def finished(self) -> Trace:
        return replace(
            self._old,
            sizes=tuple(self.sizes),
            parts=tuple(self.parts),
            part_names=tuple(self.part_names),
            events=tuple(self.events),
            marks=tuple(self.marks),
            streams=self.streams,
            returns=self._returns(),
            usage=None,
        )

    def _returns(self) -> dict[int, int]:
        """Each of them with the next allocation."""
        found: dict[int, int] = {}
        for event, numbers in self._returned:
            following = next((entry - 1 for entry in self.events[event:] if entry > 0), len(self.sizes))
            found.update(dict.fromkeys(numbers, following))
        return found


RECENT_EVENTS = 12
"""How far back the end of a gradient can be when its parameter is told of it."""


class Rewriter:
    """Goes through a plain trace; subclasses say what their library does at each turn."""

    replaces_optimizer = True
    """Whether what the plain optimizer phase allocates is left out, for `step` to put something in its place."""

    def __init__(self, trace: Trace, usage: Usage) -> None:
        self.trace, self.usage = trace, usage
        self.book = Writer(trace)
        self.gone: set[int] = set()
        """Allocations whose remaining events are left out."""
        self.phase, self.step_number = "load", 0
        self._last_gradient = _last_gradients(usage)
        self._kept: set[int] = set()
        """Allocations whose end is ours to say."""

    # What subclasses fill in.

    def loaded(self) -> None: ...

    def pass_begins(self) -> None: ...

    def forward_begins(self, module: int) -> None: ...

    def forward_ends(self, module: int) -> None: ...

    def backward_begins(self, module: int) -> None: ...

    def backward_ends(self, module: int) -> None: ...

    def gradient(self, parameter: int, number: int, *, last: bool) -> None: ...

    def read(self, parameter: int) -> None:
        """The forward of another module than its own looks at it."""

    def optimizer_begins(self) -> None: ...

    def optimizer_ends(self) -> None: ...

    # The walk.

    def rewritten(self) -> Trace:
        for event, what in self._turns():
            if isinstance(what, Mark):
                self._enter(what)
            elif what is not None:
                self._use(what, event)
            else:
                self._copy(self.trace.events[event])
        if self.phase == "optimizer":
            self.optimizer_ends()
        return self.book.finished()

    def _turns(self) -> Iterator[tuple[int, Mark | tuple[int, ...] | None]]:
        """Marks and uses stand before the event of their number; what ends something stands before a mark, what begins after."""
        marks, uses = list(self.trace.marks), list(self.usage.uses)
        mark = use = 0
        for event in range(len(self.trace.events) + 1):
            while use < len(uses) and uses[use][0] <= event and uses[use][1] in _ENDINGS:
                yield event, uses[use]
                use += 1
            while mark < len(marks) and marks[mark].event <= event:
                yield event, marks[mark]
                mark += 1
            while use < len(uses) and uses[use][0] <= event:
                yield event, uses[use]
                use += 1
            if event < len(self.trace.events):
                yield event, None

    def _enter(self, mark: Mark) -> None:
        if (mark.phase, mark.step) != (self.phase, self.step_number):
            if self.phase == "load" and mark.phase != "load":
                self.loaded()
            if self.phase == "optimizer":
                self.optimizer_ends()
        entered = mark.phase == "optimizer" and (mark.phase, mark.step) != (self.phase, self.step_number)
        self.phase, self.step_number = mark.phase, mark.step
        self.book.marks.append(replace(mark, event=len(self.book.events)))
        if entered:
            self.optimizer_begins()

    def _use(self, use: tuple[int, ...], event: int) -> None:
        kind, which = use[1], use[2]
        if kind == PASS:
            self.pass_begins()
        elif kind == FORWARD:
            self.forward_begins(which)
        elif kind == FORWARD_DONE:
            self.forward_ends(which)
        elif kind == BACKWARD:
            self.backward_begins(which)
        elif kind == BACKWARD_DONE:
            self.backward_ends(which)
        elif kind == READ:
            self.read(which)
        else:
            self.gradient(which, use[3], last=use in self._last_gradient)

    def _copy(self, entry: int) -> None:
        number = abs(entry) - 1
        if entry > 0 and self.phase == "optimizer" and self.replaces_optimizer:
            self.gone.add(number)
        if number not in self.gone and not (entry < 0 and number in self._kept):
            self.book.events.append(entry)

    def held(self, number: int) -> int | None:
        """The gradient's memory, to be given up later.

        In a later micro-step the plain trace adds a gradient up and frees it there and then; it is the latest block of its size,
        and its end is taken back.
        """
        if number < 0 or number not in self.gone:
            return None if number < 0 else number
        events = self.book.events
        for back in range(1, min(RECENT_EVENTS, len(events)) + 1):
            recent = abs(events[-back]) - 1
            if recent >= len(self.trace.sizes) or self.trace.sizes[recent] != self.trace.sizes[number] or recent in self.gone:
                continue
            if events[-back] < 0:
                self.book.take_back(len(events) - back)
            self._kept.add(recent)
            return recent
        return None

    def give_up(self, number: int | None) -> None:
        """Free an allocation of the plain trace here and now, and never again."""
        if self.gives_up(number):
            self.book.free(number)

    def gives_up(self, number: int | None) -> TypeGuard[int]:
        """Whether it is still there; from now on it is the caller's to free."""
        if number is None or number < 0 or number in self.gone:
            return False
        self.gone.add(number)
        return True


def _last_gradients(usage: Usage) -> set[tuple[int, ...]]:
    """The last gradient of each backward pass."""
    last: set[tuple[int, ...]] = set()
    pending: tuple[int, ...] | None = None
    for use in usage.uses:
        if use[1] == GRADIENT:
            pending = use
        elif use[1] == PASS and pending is not None:
            last.add(pending)
            pending = None
    return last if pending is None else last | {pending}


def optimizer_of(trace: Trace, usage: Usage) -> Optimizer:
    """Read off the plain trace's own optimizer phase."""
    trained = [parameter for parameter in usage.parameters if parameter.trains]
    if not trained:
        raise ValueError("a model without trainable parameters has no optimizer to shard")
    kept, passing = _optimizer_phase(trace)
    if not kept:
        raise ValueError("the trace has no optimizer state to shard: follow it over at least one optimizer step")
    count, size = sum(parameter.count for parameter in trained), sum(parameter.size for parameter in trained)
    largest = max(parameter.size for parameter in trained)
    mirrors = max(kept) == largest
    listed = len(set(passing)) > 1 or sum(passing) > 4 * largest
    copies = sum(passing) / (size if listed else passing[0]) if passing else 0
    return Optimizer(
        state_copies=sum(kept) / size if mirrors else None,
        state_bytes_per_count=sum(kept) / count,
        temporary_copies=round(copies),
        listed=listed,
    )


SMALL_BYTES = 64
"""Step counts, norms and learning rates."""


def _optimizer_phase(trace: Trace) -> tuple[list[int], list[int]]:
    """Of the first optimizer step: sizes of what it leaves behind, and of what passes, as it stands when the first of it goes.

    Where parameters are updated one by one that is one parameter's own; later the last parameter's may still be there.
    """
    first = min((mark.step for mark in trace.marks if mark.phase == "optimizer"), default=0)
    spans = [span for mark, span in trace.stretches() if (mark.phase, mark.step) == ("optimizer", first)]
    inside = [trace.events[event] for span in spans for event in span]
    freed = {-entry - 1 for entry in inside if entry < 0}
    kept = [trace.sizes[entry - 1] for entry in inside if entry > 0 and entry - 1 not in freed]
    passing: dict[int, int] = {}
    begun = next((at for at, entry in enumerate(inside) if entry > 0 and entry - 1 not in freed), 0)
    for entry in inside[begun:]:  # what comes before the first state is the clipping's
        number = abs(entry) - 1
        if entry < 0 and number in passing:
            break
        if entry > 0 and number in freed and trace.sizes[number] > SMALL_BYTES:
            passing[number] = trace.sizes[number]
    return kept, list(passing.values())
