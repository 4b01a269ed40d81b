"""What a trace says about memory, in a few integers per phase: all that the timeline needs.

What stands around the step is put in; then the allocator is replayed twice, once as traced and once after a first step of
shorter sequences, which leaves cached blocks of sizes that serve nobody later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from autotune.measurement import Phase
from autotune.predict.around import Surroundings, emptied, insertions, loaded_once, places_in, second_cycle
from autotune.predict.augment import Insertion, inserted
from autotune.predict.course import Integers
from autotune.predict.replay import Held, Replay, Track
from autotune.trace import Part, Trace

SHORTER = 0.85
"""Share of the longest length that the first step has in the second replay: close enough to the real one that its cached
blocks look useful, short enough that they aren't."""

OF_THE_BATCH: frozenset[Part] = frozenset({"activations", "logits", "workspaces", "inputs"})
"""Parts whose size follows the batch's length."""


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
    return Stage(trace, around or Surroundings()).usage(capacity_bytes)


def goes_through(trace: Trace, around: Surroundings, *, capacity_bytes: int) -> bool:
    """Whether the steps run in this much memory, whatever length came first, with the cache given back where it must be."""
    return Stage(trace, around).goes_through(capacity_bytes)


class Stage:
    """A step amid its surroundings, ready to be replayed: with its own sizes, and with those that it has elsewhere."""

    def __init__(self, trace: Trace, around: Surroundings) -> None:
        self._step = loaded_once(trace)
        self._places = places_in(self._step)
        put_in = list(insertions(self._places, around))
        whole = inserted(self._step, put_in)
        self._around, self._orders = around, _orders(put_in)
        self._track = Track(whole, empty_cache_before=frozenset(emptied(whole, around)), resting_before=second_cycle(whole))
        self._sizes = self._track.sizes
        self._shrinking = _of_first_batches(whole)
        self._known: dict[int | None, Usage] = {}

    def at(self, sizes: Integers, around: Surroundings) -> Stage | None:
        """The same step where its allocations are of these sizes; None where its surroundings have other events."""
        put_in = list(insertions(self._places, around))
        if _orders(put_in) != self._orders or _habits(around) != _habits(self._around):
            return None
        other = object.__new__(Stage)
        other.__dict__.update(self.__dict__, _around=around, _known={})
        other._sizes = np.concatenate([sizes, *(np.array(one.sizes, dtype=np.int64) for one in _in_order(put_in))])
        return other

    def usage(self, capacity_bytes: int | None = None) -> Usage:
        """What it takes, without an end to the memory or with so much of it; then as traced alone, no shorter step before."""
        if capacity_bytes not in self._known:
            self._known[capacity_bytes] = self._used() if capacity_bytes is None else self._squeezed(capacity_bytes)
        return self._known[capacity_bytes]

    def cannot_go_through(self, capacity_bytes: int) -> bool:
        """Whether more is requested at one time than there is: then no allocator helps, and nothing need be replayed."""
        return capacity_bytes < max(use.requested_bytes for use in self.usage().phases)

    def goes_through(self, capacity_bytes: int) -> bool:
        """Whether the steps run in this much memory, whatever length came first."""
        if capacity_bytes >= self.usage().reserved_high_bytes:
            return True
        return not self.cannot_go_through(capacity_bytes) and all(
            self._replay(sizes, capacity_bytes).out_of_memory is None for sizes in (self._sizes, self._shorter_first())
        )

    def _used(self) -> Usage:
        with ThreadPoolExecutor(1) as beside:  # compiled, a replay holds no lock, and a second core is often there
            later = beside.submit(self._track.reserved, self._shorter_first(), settings=self._around.settings)
            plain = self._replay(self._sizes, None)
            return _as_usage(plain, later.result())

    def _squeezed(self, capacity_bytes: int) -> Usage:
        return _as_usage(self._replay(self._sizes, capacity_bytes), {})

    def _replay(self, sizes: Integers, capacity_bytes: int | None) -> Replay:
        return self._track.replay(sizes, settings=self._around.settings, capacity_bytes=capacity_bytes)

    def _shorter_first(self) -> Integers:
        """The same with a first step of shorter sequences."""
        sizes = self._sizes.copy()
        sizes[self._shrinking] = np.maximum(1, (sizes[self._shrinking] * SHORTER).astype(np.int64))
        return sizes


def _as_usage(plain: Replay, after_shorter: Mapping[Phase, int]) -> Usage:
    rest = plain.resting or plain.phases[-1]
    return Usage(
        phases=tuple(_by_phase(plain, after_shorter)),
        resting=_use(rest, [rest], 0),
        loaded_bytes=_loaded(plain),
        retries=plain.retries,
        out_of_memory=plain.phases[-1].phase if plain.out_of_memory is not None else None,
    )


def _orders(put_in: Sequence[Insertion]) -> tuple[object, ...]:
    return tuple((one.event, one.phase, tuple(one.order)) for one in _in_order(put_in))


def _in_order(put_in: Sequence[Insertion]) -> list[Insertion]:
    return sorted(put_in, key=lambda one: one.event)


def _habits(around: Surroundings) -> tuple[object, ...]:
    """When the cache is given back, and how it is kept."""
    return around.empties_before_rollout, around.empty_cache_steps, around.settings


def _of_first_batches(trace: Trace) -> Integers:
    """Allocations of the first step whose size follows the batch's length."""
    shrinking = {index for index, part in enumerate(trace.part_names) if part in OF_THE_BATCH}
    spans = [span for mark, span in trace.stretches() if mark.step == 0 and mark.phase != "load"]
    made = [trace.events[at] - 1 for span in spans for at in span if trace.events[at] > 0]
    return np.array([number for number in made if trace.parts[number] in shrinking], dtype=np.int64)


def _by_phase(plain: Replay, after_shorter: Mapping[Phase, int]) -> Iterator[PhaseUse]:
    """The highest of each phase's occurrences; of equal ones the latest, which has the optimizer's state."""
    order: dict[Phase, list[Held]] = {}
    for held in plain.phases:
        order.setdefault(held.phase, []).append(held)
    for phase, several in order.items():
        top = max(reversed(several), key=lambda held: held.allocated_bytes)
        yield _use(top, several, after_shorter.get(phase, 0))


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
