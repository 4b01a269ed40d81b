"""What a trace says about memory, in a few integers per phase: all that the timeline needs.

The library workspaces and the rollout, which no trace has, are put in; then the allocator is replayed twice, once as
traced and once after a first step of shorter sequences, which leaves cached blocks of sizes that serve nobody later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autotune.measurement import Phase
from autotune.predict.allocator import AllocatorSettings
from autotune.predict.augment import Insertion, inserted
from autotune.predict.replay import Held, Replay, replay
from autotune.trace import Mark, Part, Trace

SHORTER = 0.85
"""Share of the longest length that the first step has in the second replay: close enough to the real one that its cached
blocks look useful, short enough that they aren't."""

OF_THE_BATCH: frozenset[Part] = frozenset({"activations", "logits", "workspaces", "inputs"})
"""Parts whose size follows the batch's length."""


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


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """What torch holds at most while one phase runs, cached blocks of earlier ones included."""

    phase: Phase
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_high_bytes: int
    """The same after a first step of shorter sequences."""

    parts: Mapping[Part, int]
    """Requested bytes by part when most is allocated."""

    largest_bytes: int = 0
    """The largest single request among them; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One rank's, by phase."""

    phases: tuple[PhaseUse, ...]
    """In the order of a cycle, each phase that occurs once; `load` first."""

    resting: PhaseUse
    """Between two steps, when the next rollout begins: the state, and no more of the cache than is left to it then."""

    loaded_bytes: int
    """Reserved when everything is loaded and no step has run: what an engine finds when it starts."""

    retries: int = 0
    """Times the cache had to be given back for want of room."""

    out_of_memory: Phase | None = None
    """The phase in which the room ended, where it was limited and did."""

    @property
    def allocated_bytes(self) -> int:
        return max(use.allocated_bytes for use in self.phases)

    @property
    def reserved_bytes(self) -> int:
        return max(use.reserved_bytes for use in self.phases)

    @property
    def reserved_high_bytes(self) -> int:
        return max(use.reserved_high_bytes for use in self.phases)


def usage(trace: Trace, around: Surroundings | None = None, *, capacity_bytes: int | None = None) -> Usage:
    """Replay the trace amid its surroundings."""
    around = around or Surroundings()
    whole = _whole(trace, around)
    emptied = frozenset(_emptied(whole, around))
    rest = _second_cycle(whole)
    plain, shorter = (
        replay(one, settings=around.settings, capacity_bytes=capacity_bytes, empty_cache_before=emptied, resting_before=rest)
        for one in (whole, _shorter_first(whole))
    )
    return Usage(
        phases=tuple(_by_phase(plain, shorter)),
        resting=_use(plain.resting or plain.phases[-1], [plain.resting or plain.phases[-1]], 0),
        loaded_bytes=_loaded(plain),
        retries=plain.retries,
        out_of_memory=plain.phases[-1].phase if plain.out_of_memory is not None else None,
    )


def goes_through(trace: Trace, around: Surroundings, *, capacity_bytes: int) -> bool:
    """Whether the steps run in this much memory, whatever length came first, with the cache given back where it must be."""
    whole = _whole(trace, around)
    emptied = frozenset(_emptied(whole, around))
    return all(
        replay(one, settings=around.settings, capacity_bytes=capacity_bytes, empty_cache_before=emptied).out_of_memory is None
        for one in (whole, _shorter_first(whole))
    )


def _by_phase(plain: Replay, shorter: Replay) -> Iterator[PhaseUse]:
    """The highest of each phase's occurrences; of equal ones the latest, which has the optimizer's state."""
    order: dict[Phase, list[Held]] = {}
    for held in plain.phases:
        order.setdefault(held.phase, []).append(held)
    higher: dict[Phase, int] = {}
    for held in shorter.phases:
        higher[held.phase] = max(held.reserved_bytes, higher.get(held.phase, 0))
    for phase, several in order.items():
        top = max(reversed(several), key=lambda held: held.allocated_bytes)
        yield _use(top, several, higher.get(phase, 0))


def _use(top: Held, several: list[Held], higher: int) -> PhaseUse:
    reserved = max(held.reserved_bytes for held in several)
    return PhaseUse(
        phase=top.phase,
        requested_bytes=top.requested_bytes,
        allocated_bytes=top.allocated_bytes,
        reserved_bytes=reserved,
        reserved_high_bytes=max(reserved, higher),
        parts=top.parts,
        largest_bytes=top.largest_bytes,
    )


def _loaded(plain: Replay) -> int:
    return next((held.reserved_bytes for held in plain.phases if held.phase == "load"), 0)


# What is put in.


def _whole(trace: Trace, around: Surroundings) -> Trace:
    once = _loaded_once(trace)
    return inserted(once, _insertions(once, around))


def _loaded_once(trace: Trace) -> Trace:
    """What is prepared between the phases of a step is no loading any more, but of the phase before it."""
    marks: list[Mark] = []
    for mark in trace.marks:
        before = next((one.phase for one in reversed(marks) if one.phase != "load"), None)
        marks.append(mark if mark.phase != "load" or before is None else dataclasses.replace(mark, phase=before))
    return dataclasses.replace(trace, marks=tuple(marks))


def _insertions(trace: Trace, around: Surroundings) -> Iterator[Insertion]:
    if around.loads_at_once and (weights := _loaded_weights(trace)):
        yield Insertion(event=0, sizes=(weights,), parts=("weights",), order=(1, -1), phase="load")
    yield from _workspaces(trace, around.cublas_workspace_bytes)
    before = _second_cycle(trace)
    if before is None:
        return
    step = _step_at(trace, before)
    if around.merge_bytes:
        yield Insertion(event=before, sizes=(around.merge_bytes,), parts=("workspaces",), order=(1, -1), phase="sync", step=step)
    if around.generation is not None:
        yield _rollout(around.generation, before, step)


def _loaded_weights(trace: Trace) -> int:
    """What is loaded and stays, adapters apart: they are made afterwards."""
    end = next((span.stop for mark, span in trace.stretches() if mark.phase == "load"), 0)
    return trace.live_parts_at(end - 1).get("weights", 0) if end else 0


def _workspaces(trace: Trace, size: int) -> Iterator[Insertion]:
    """cuBLAS's, one per thread that multiplies: the first that runs a forward pass, and autograd's."""
    if not size:
        return
    for phases in (("score", "forward"), ("backward",)):
        first = next((span for mark, span in trace.stretches() if mark.phase in phases and len(span)), None)
        if first is not None:
            yield Insertion(event=first.start + 1, sizes=(size,), parts=("workspaces",), order=(1,))


def _second_cycle(trace: Trace) -> int | None:
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
    growth = _Growth(generation)
    growth.prefill()
    growth.decode()
    return Insertion(event=event, sizes=growth.sizes, parts=growth.parts, order=growth.order, phase="rollout", step=step)


class _Growth:
    """Writes the events of a generation whose cache is concatenated token by token."""

    LENGTHS = 64
    PIECES = 8

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.sizes: list[int] = []
        self.parts: list[Part] = []
        self.order: list[int] = []
        self._held: list[int] = []
        self._gathered: list[int] = []

    def prefill(self) -> None:
        self._gathered = [self._make(size, "communication") for size in _pieces(self.generation.gathered_bytes, self.PIECES)]
        transient = [self._make(size, "activations") for size in _pieces(self.generation.prefill_bytes, self.PIECES)]
        self._held = [self._make(self._tensor(0.0), "kv_cache") for _ in range(self._tensors)]
        for number in transient:
            self._drop(number)

    def decode(self) -> None:
        lengths = min(self.LENGTHS, max(1, self.generation.completion_length))
        for at in range(1, lengths + 1):
            for index, old in enumerate(self._held):
                self._held[index] = self._make(self._tensor(at / lengths), "kv_cache")
                self._drop(old)
            beside = [self._make(self.generation.logits_bytes, "logits"), self._make(self.generation.decode_bytes, "activations")]
            for number in beside:
                self._drop(number)
        for number in (*self._held, *self._gathered):
            self._drop(number)

    @property
    def _tensors(self) -> int:
        return 2 * max(1, self.generation.layers)

    def _tensor(self, share: float) -> int:
        """Keys or values of one layer, when this share of the completion is there."""
        whole = self.generation
        length = whole.prompt_length + share * whole.completion_length
        return int(whole.kv_cache_bytes * length / (whole.prompt_length + whole.completion_length)) // self._tensors

    def _make(self, size: int, part: Part) -> int:
        self.sizes.append(size)
        self.parts.append(part)
        self.order.append(len(self.sizes))
        return len(self.sizes)

    def _drop(self, number: int) -> None:
        self.order.append(-number)


def _pieces(size: int, count: int) -> Iterator[int]:
    """Of a sum whose allocations are not known one by one."""
    if size:
        yield from (size // count + (1 if piece < size % count else 0) for piece in range(count))


def _emptied(whole: Trace, around: Surroundings) -> Iterator[int]:
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


def _shorter_first(trace: Trace) -> Trace:
    """The same with a first step of shorter sequences."""
    sizes = list(trace.sizes)
    shrinking = {index for index, part in enumerate(trace.part_names) if part in OF_THE_BATCH}
    for number in _made_in_first_step(trace):
        if trace.parts[number] in shrinking:
            sizes[number] = max(1, int(sizes[number] * SHORTER))
    return dataclasses.replace(trace, sizes=tuple(sizes))


def _made_in_first_step(trace: Trace) -> Iterable[int]:
    for mark, span in trace.stretches():
        if mark.step == 0 and mark.phase != "load":
            yield from (trace.events[at] - 1 for at in span if trace.events[at] > 0)
