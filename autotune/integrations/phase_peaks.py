"""Peak memory by phase of a training, on one rank.

The trainer's own methods are the phases, the outermost one counts. Counters are only read:

    mark    highest memory so far
    held    memory at this moment

A phase that raises the mark has the new mark as its peak. Another one has at least what is held at
its begin and its end. On a GPU this is its peak, because torch's reserved memory only grows inside
a phase, unless the allocator gives its cache back. On a CPU it is a lower bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from autotune.guard.trainer_facts import ShownFacts, TrainingRows

PHASES_BY_METHOD: Mapping[str, str] = {
    "_generate": "rollout",
    "_calculate_rewards": "reward",
    "_get_per_token_logps_and_entropies": "score",
    "compute_loss": "forward",
    "evaluate": "evaluation",
    "_save_checkpoint": "checkpoint",
}
"""Methods of TRL's and transformers' trainers."""

PHASES_OF_ROWS = frozenset({"forward", "backward", "evaluation"})

ROWS = (("prompt_ids", "completion_ids"), ("input_ids",))
"""Tensors of a batch whose widths together are the length of a row."""


class MemoryMoment(NamedTuple):
    mark_bytes: int
    held_bytes: int


class PhasePeaks:
    """Peaks so far, and the phase that runs."""

    def __init__(self, read: Callable[[], MemoryMoment]) -> None:
        self._read = read
        self._peaks: dict[str, int] = {}
        self._phase: str | None = None
        self._refused_in: str | None = None
        self._rows: TrainingRows | None = None
        self._longest_row: int | None = None

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Run in a phase. An error leaves it in place for `ran_out`."""
        if self._phase is not None:
            yield
            return
        before = self._read()
        self._phase = phase
        try:
            yield
        finally:
            self._note(phase, before)
        self._phase = None

    def _note(self, phase: str, before: MemoryMoment) -> None:
        after = self._read()
        peak = max(before.held_bytes, after.held_bytes)
        if after.mark_bytes > before.mark_bytes:
            peak = after.mark_bytes
        self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    def see_batch(self, batch: object) -> None:
        """Note the rows of a forward pass."""
        self._rows = _rows_of(batch)
        if self._rows is not None:
            self._longest_row = max(self._rows.tokens, self._longest_row or 0)

    def step_ended(self) -> None:
        """Forget a phase that an error left and somebody caught."""
        self._phase = None

    def ran_out(self) -> None:
        """Note that memory ran out here."""
        self._refused_in = self._phase

    def facts(self) -> ShownFacts:
        is_of_rows = self._refused_in in PHASES_OF_ROWS
        return ShownFacts(
            phase_peak_bytes=dict(self._peaks),
            longest_row=self._longest_row,
            ran_out_in=self._refused_in,
            ran_out_rows=self._rows if is_of_rows else None,
        )

    def watch(self, owner: Any, name: str, phase: str) -> Callable[[], None] | None:
        """Make one object's method a phase; return the undo function, None: it has no such."""
        method = getattr(owner, name, None)
        if not callable(method):
            return None

        @functools.wraps(method)
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            with self.inside(phase):
                if phase == "forward":
                    self.see_batch(kwargs.get("inputs", args[1] if len(args) > 1 else None))
                return method(*args, **kwargs)

        return replaced(owner, name, in_phase)


def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace one object's method; return the undo function."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if vars(owner).get(name) is not method:
            return  # a later wrapper of another library stays
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _rows_of(batch: object) -> TrainingRows | None:
    if not isinstance(batch, Mapping):
        return None
    for names in ROWS:
        rows = tokens = 0
        for name in names:
            shape = tuple(getattr(batch.get(name), "shape", ()))
            if len(shape) == 2:
                rows = int(shape[0])
                tokens += int(shape[1])
        if rows:
            return TrainingRows(rows=rows, tokens=tokens)
    return None
