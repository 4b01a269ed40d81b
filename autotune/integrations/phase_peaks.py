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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

PHASES_OF_ROWS = frozenset({"score", "forward", "backward", "evaluation"})

PROMPT_IDS = "prompt_ids"
COMPLETION_IDS = "completion_ids"
ROW_IDS = "input_ids"
"""Tensors of a batch; their width is the length of a row, or of its part."""


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
        self._longest = ShownFacts(phase_peak_bytes={})

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

    def see_rows(self, rows: TrainingRows | None) -> None:
        """Note the rows of a forward pass."""
        self._rows = rows
        if rows is None:
            return
        self._longest = self._longest.with_lengths(
            rows.tokens, rows.prompt_tokens, rows.completion_tokens
        )

    def step_ended(self) -> None:
        """Forget a phase that ended with an error which was caught."""
        self._phase = None

    def ran_out(self) -> None:
        """Note that memory ran out here."""
        self._refused_in = self._phase

    def facts(self) -> ShownFacts:
        is_of_rows = self._refused_in in PHASES_OF_ROWS
        return replace(
            self._longest,
            phase_peak_bytes=dict(self._peaks),
            ran_out_in=self._refused_in,
            ran_out_rows=self._rows if is_of_rows else None,
        )

    def watch(self, owner: Any, name: str, phase: str) -> Callable[[], None] | None:
        """Make one object's method a phase; return the undo function, None: it has no such."""
        method = getattr(owner, name, None)
        if not callable(method):
            return None
        rows_of = ROWS_BY_PHASE.get(phase)

        @functools.wraps(method)
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            with self.inside(phase):
                if rows_of is not None:
                    arguments = dict(zip(PARAMETERS[phase], args, strict=False))
                    arguments |= kwargs
                    self.see_rows(rows_of(arguments))
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


def _rows_of_loss(arguments: Mapping[str, Any]) -> TrainingRows | None:
    """Return the rows of `compute_loss`."""
    batch = arguments.get("inputs")
    if not isinstance(batch, Mapping):
        return None
    rows, row_tokens = _shape_of(batch.get(ROW_IDS))
    _, prompt_tokens = _shape_of(batch.get(PROMPT_IDS))
    completions, completion_tokens = _shape_of(batch.get(COMPLETION_IDS))
    if completions:
        tokens = prompt_tokens + completion_tokens
        return TrainingRows(
            rows=completions,
            tokens=tokens,
            completion_tokens=completion_tokens,
        )
    if not rows:
        return None
    return TrainingRows(rows=rows, tokens=row_tokens)


def _rows_of_score(arguments: Mapping[str, Any]) -> TrainingRows | None:
    """Return the rows of one pass of `_get_per_token_logps_and_entropies`."""
    rows, tokens = _shape_of(arguments.get(ROW_IDS))
    if not rows:
        return None
    return TrainingRows(
        rows=arguments.get("batch_size") or rows,
        tokens=tokens,
        completion_tokens=arguments.get("logits_to_keep"),
    )


def _shape_of(tensor: object) -> tuple[int, int]:
    """Return rows and width of a batch's tensor; zeros for another one."""
    shape: Sequence[int] = getattr(tensor, "shape", ())
    if len(shape) != 2:
        return 0, 0
    rows, width = shape
    return int(rows), int(width)


ROWS_BY_PHASE: Mapping[str, Callable[[Mapping[str, Any]], TrainingRows | None]] = {
    "forward": _rows_of_loss,
    "score": _rows_of_score,
}
"""Phases whose methods are called with a batch."""

PARAMETERS: Mapping[str, Sequence[str]] = {
    "forward": ("model", "inputs"),
    "score": ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
}
"""First parameters of these methods, in their order."""
