"""What is put into a trace before it is replayed: the library workspaces and the rollout, which no trace has, and where the
cache is given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autotune.measurement import Phase
from autotune.predict.allocator import AllocatorSettings
from autotune.predict.augment import Insertion
from autotune.trace import Mark, Part, Trace


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A rollout inside the trainer's own allocator: what its caches and its widest moments take."""

    kv_cache_bytes: int
    """At the longest length, over all layers."""

    logits_bytes: int
    """Beside the cache at the longest length."""

    prefill_bytes: int
    """Beside the prompts' cache while it is made."""

    decode_bytes: int
    """Activations beside the cache and the logits at the longest length."""

    layers: int
    prompt_length: int
    completion_length: int
    gathered_bytes: int = 0
    """Weights that other ranks hold, kept here while it lasts."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What happens around the traced step, on its device."""

    cublas_workspace_bytes: int = 0
    generation: Generation | None = None
    merge_bytes: int = 0
    """What handing the weights to an engine takes for a moment: the largest merged adapter, a gathered parameter."""

    loads_at_once: bool = False
    """Whether one block for all weights is asked for and given back before they are loaded, which then lie in it."""

    empties_before_rollout: bool = False
    """Whether the cache is given back before and after each rollout, as a sleeping engine makes it."""

    empty_cache_steps: int | None = None
    """The framework's own habit: the cache is given back before the backward passes of every so-many-th step."""

    settings: AllocatorSettings = dataclasses.field(default_factory=AllocatorSettings)


def loaded_once(trace: Trace) -> Trace:
    """What is prepared between the phases of a step is no loading any more, but of the phase before it."""
    marks: list[Mark] = []
    for mark in trace.marks:
        before = next((one.phase for one in reversed(marks) if one.phase != "load"), None)
        marks.append(mark if mark.phase != "load" or before is None else dataclasses.replace(mark, phase=before))
    return dataclasses.replace(trace, marks=tuple(marks))


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where in a step its surroundings belong: looked up once, however many surroundings there are."""

    loaded_bytes: int
    multiplying: tuple[int, ...]
    """Events at which a thread has multiplied for the first time."""

    cycle: int | None
    """Where the next rollout would be."""

    step: int
    """In which that is."""


def places_in(trace: Trace) -> Places:
    cycle = second_cycle(trace)
    return Places(
        loaded_bytes=_loaded_weights(trace),
        multiplying=tuple(_first_products(trace)),
        cycle=cycle,
        step=0 if cycle is None else _step_at(trace, cycle),
    )


def insertions(places: Places, around: Surroundings) -> Iterator[Insertion]:
    if around.loads_at_once and places.loaded_bytes:
        yield Insertion(event=0, sizes=(places.loaded_bytes,), parts=("weights",), order=(1, -1), phase="load")
    for event in places.multiplying if around.cublas_workspace_bytes else ():
        yield Insertion(event=event, sizes=(around.cublas_workspace_bytes,), parts=("workspaces",), order=(1,))
    if places.cycle is None:
        return
    if around.merge_bytes:
        merged = (around.merge_bytes,)
        yield Insertion(event=places.cycle, sizes=merged, parts=("workspaces",), order=(1, -1), phase="sync", step=places.step)
    if around.generation is not None:
        yield _rollout(around.generation, places.cycle, places.step)


def _loaded_weights(trace: Trace) -> int:
    """What is loaded and stays, adapters apart: they are made afterwards."""
    end = next((span.stop for mark, span in trace.stretches() if mark.phase == "load"), 0)
    return trace.live_parts_at(end - 1).get("weights", 0) if end else 0


def _first_products(trace: Trace) -> Iterator[int]:
    """cuBLAS has a workspace per thread that multiplies: the first that runs a forward pass, and autograd's."""
    for phases in (("score", "forward"), ("backward",)):
        first = next((span for mark, span in trace.stretches() if mark.phase in phases and len(span)), None)
        if first is not None:
            yield first.start + 1


def second_cycle(trace: Trace) -> int | None:
    """Where the next rollout would be: the state between two steps, with the optimizer's; the end where one step was traced."""
    loaded = False
    for mark in trace.marks:
        if mark.step >= 1 and mark.phase != "load":
            return mark.event
        loaded = loaded or mark.phase == "load"
    return len(trace.events) if loaded and len(trace.marks) > 1 else None


def _step_at(trace: Trace, event: int) -> int:
    return next(mark.step for mark in reversed(trace.marks) if mark.event <= event)


def _rollout(generation: Generation, event: int, step: int) -> Insertion:
    """Prompts in one pass, then a cache that is copied into a larger one at every step.

    Growth is followed at so many lengths that no step is larger than a few percent; the copies of one layer replace each
    other in between exactly as they do from token to token.
    """
    return _Growth(generation).insertion(event, step)


class _Growth:
    """The sizes of a generation whose cache is concatenated token by token; its events are those of every one like it."""

    LENGTHS = 64
    PIECES = 8

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._tensors = 2 * max(1, generation.layers)
        self._lengths = min(self.LENGTHS, max(1, generation.completion_length))
        self._gathered = tuple(_pieces(generation.gathered_bytes, self.PIECES))
        self._passing = tuple(_pieces(generation.prefill_bytes, self.PIECES))

    def insertion(self, event: int, step: int) -> Insertion:
        parts, order = _course(self._tensors, self._lengths, len(self._gathered), len(self._passing))
        return Insertion(event=event, sizes=self._sizes(), parts=parts, order=order, phase="rollout", step=step)

    def _sizes(self) -> tuple[int, ...]:
        """In the order of `_course`."""
        first, *later = self._of_tensors()
        found = [*self._gathered, *self._passing, *[first] * self._tensors]
        for one in later:
            found += [one] * self._tensors
            found += (self.generation.logits_bytes, self.generation.decode_bytes)
        return tuple(found)

    def _of_tensors(self) -> Iterator[int]:
        """Keys or values of one layer, at each length that is followed."""
        whole = self.generation
        for at in range(self._lengths + 1):
            length = whole.prompt_length + at / self._lengths * whole.completion_length
            yield int(whole.kv_cache_bytes * length / (whole.prompt_length + whole.completion_length)) // self._tensors


@cache
def _course(tensors: int, lengths: int, gathered: int, passing: int) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """What a generation's allocations are, and its events: the same ones whatever their sizes, and thousands of them."""
    parts: list[Part] = []
    order: list[int] = []

    def make(count: int, part: Part) -> list[int]:
        made = list(range(len(parts) + 1, len(parts) + 1 + count))
        parts.extend([part] * count)
        order.extend(made)
        return made

    others = make(gathered, "communication")
    transient = make(passing, "activations")
    held = make(tensors, "kv_cache")
    order.extend(-one for one in transient)
    for _ in range(lengths):
        for at, old in enumerate(held):
            (held[at],) = make(1, "kv_cache")
            order.append(-old)
        order.extend(-one for one in [*make(1, "logits"), *make(1, "activations")])
    order.extend(-one for one in (*held, *others))
    return tuple(parts), tuple(order)


def _pieces(size: int, count: int) -> Iterator[int]:
    """Of a sum whose allocations are not known one by one."""
    if size:
        yield from (size // count + (1 if piece < size % count else 0) for piece in range(count))


def emptied(whole: Trace, around: Surroundings) -> Iterator[int]:
    """Events before which the cache is given back."""
    previous: Phase | None = None
    begun: set[int] = set()
    for mark, span in whole.stretches():
        if not len(span) or mark.phase == previous:
            continue
        begins = mark.phase != "load" and mark.step not in begun
        written = previous in ("rollout", "sync") and mark.phase not in ("rollout", "sync")
        if around.empties_before_rollout and (begins or written):
            yield span.start
        every = around.empty_cache_steps
        if mark.phase == "backward" and every and mark.step % every == 0:
            yield span.start
        begun |= {mark.step} if begins else set()
        previous = mark.phase
