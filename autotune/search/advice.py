"""Advice: the cheapest changes that make a candidate fit, with their effect on speed.

Of each kind of change the strongest is tried first: if it does not fit, no milder one does. If it
fits, the mildest one that fits is the advice. Kinds without an effect on learning come first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.answer import WayToFit
from autotune.core.errors import CannotPredict, ProbeError
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, setting_text

if TYPE_CHECKING:
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest

MAX_WAYS = 5

# Settings that change together at one global batch, and count as one change.
BATCH_KNOBS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
MAX_SECONDS = 60.0  # Time limit; the ways found by then are returned
KnobValues = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Changes of one thing, mildest first."""

    changes: tuple[KnobValues, ...]
    learning: bool


def ways_to_fit(
    request: ParsedRequest,
    candidate: Candidate | None,
    service: PredictionService,
    *,
    refuted: Iterable[str] = (),
    prediction: Prediction | None = None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[WayToFit, ...]:
    """Return changes of one kind, or else of two, that surely make the candidate fit; neutral ones
    first, then by speed. If weight sync is the peak, transfer of the adapter alone precedes them.
    Empty if there is no candidate or no prediction.

    `refuted`: ids of candidates that a measurement showed not to fit. `prediction`: the
    candidate's, where it is known.
    """
    if candidate is None:
        return ()
    try:
        prediction = prediction or service.predict(candidate)
    except (CannotPredict, ProbeError):
        return ()
    adviser = _Adviser(request, service, candidate, prediction, frozenset(refuted))
    until = now() + MAX_SECONDS
    kinds = adviser.kinds()
    for number in (1, 2):
        ways: list[WayToFit] = []
        for chosen in itertools.combinations(kinds, number):
            if len(ways) == MAX_WAYS or now() > until:
                break
            if (way := adviser.mildest(chosen)) is not None:
                ways.append(way)
        if ways:
            return tuple(sorted(ways, key=adviser.rank))
    return ()


@dataclass(frozen=True)
class _Adviser:
    """Searches the neighbourhood of one candidate."""

    request: ParsedRequest
    service: PredictionService
    candidate: Candidate
    prediction: Prediction
    refuted: frozenset[str]

    def kinds(self) -> list[Kind]:
        """Return the possible kinds of changes, neutral ones first."""
        space = self.request.whole_space
        alone = [knob for knob in (*space.knobs, *space.remedies) if knob.name not in BATCH_KNOBS]
        possible = [self._smaller_batches(), *map(self._knob_changes, alone)]
        return sorted((kind for kind in possible if kind.changes), key=lambda kind: kind.learning)

    def rank(self, way: WayToFit) -> tuple[bool, bool, float]:
        """Sort key: relief of the sync if that is the peak, effect on learning, speed; an
        unknown speed comes last.
        """
        relieves_sync = False
        if self.prediction.peak_phase is not None and self.prediction.peak_phase.name == "sync":
            trainer, task = self.request.trainer, self.request.job.task
            before, after = (
                trainer.compose(self.candidate, task),
                trainer.compose(self._changed(way.change), task),
            )
            relieves_sync = after.syncs_adapter_only and not before.syncs_adapter_only
        return (
            not relieves_sync,
            way.learning,
            -way.speed_ratio if way.speed_ratio is not None else float("inf"),
        )

    def _changed(self, change: KnobValues) -> Candidate:
        knobs = self.request.whole_space.with_remedies({**self.candidate.knobs, **change})
        return self.request.trainer.complete(knobs, self.request.job.task)

    def _knob_changes(self, knob: Knob) -> Kind:
        settings = self.candidate.settings
        learning, now = knob.effect_under(settings) == "learning", settings.get(knob.name)
        others: list[KnobValue] = [
            choice for choice in knob.choices if choice != now and choice is not None
        ]
        if now in knob.choices and (learning or knob.memory in ("grows", "shrinks")):
            position = knob.choices.index(now)
            # Learning knobs are ordered by preference, neutral ones by memory.
            others = (
                list(knob.choices[position + 1 :])
                if learning
                else list(knob.choices[:position])[::-1]
            )
        return Kind(changes=tuple({knob.name: choice} for choice in others), learning=learning)

    def _smaller_batches(self) -> Kind:
        """Return smaller micro-batches with more accumulation, at the same global batch."""
        micro, steps = (self.candidate.settings.get(name) for name in BATCH_KNOBS[:2])
        if not isinstance(micro, int) or not isinstance(steps, int):
            return Kind(changes=(), learning=False)
        smaller = [size for size in range(micro - 1, 0, -1) if (micro * steps) % size == 0]
        powers = [size for size in smaller if size & (size - 1) == 0] or smaller
        changes = tuple(
            {BATCH_KNOBS[0]: size, BATCH_KNOBS[1]: micro * steps // size} for size in powers
        )
        return Kind(changes=changes, learning=False)

    def mildest(self, kinds: Sequence[Kind]) -> WayToFit | None:
        """Return the mildest change of the last kind that fits, beside the strongest of the
        others.
        """
        fixed = {name: value for kind in kinds[:-1] for name, value in kind.changes[-1].items()}
        last = kinds[-1].changes
        strongest = self._way({**fixed, **last[-1]})
        if strongest is None:
            return None
        milder = (self._way({**fixed, **change}) for change in last[:-1])
        return next((way for way in milder if way is not None), strongest)

    def _way(self, change: KnobValues) -> WayToFit | None:
        """Return this change if it is legal and surely fits."""
        other, request = self._changed(change), self.request
        unchanged = other == self.candidate or other.id in self.refuted
        if unchanged or request.trainer.why_illegal(other, request.job.task) is not None:
            return None
        try:
            prediction = self.service.predict(other)
        except (CannotPredict, ProbeError):  # the ways found so far remain valid
            return None
        if not prediction.fits:
            return None
        learning = request.whole_space.is_learning(change, other.settings)
        ratio, was, becomes = None, self.prediction.tokens_per_second, prediction.tokens_per_second
        if not learning and was is not None and becomes is not None:
            ratio = becomes.value / was.value
        effective = {
            name: value
            for name, value in change.items()
            if name in other.settings or value is not None
        }
        return WayToFit(
            change=effective, learning=learning, prediction=prediction, speed_ratio=ratio
        )


def as_flags(change: KnobValues, flag: str = "--set") -> str:
    """Return the change as flags of `predict`, or with `--hold` of `run`."""
    return " ".join(f"{flag} {name}={setting_text(value)}" for name, value in change.items())
