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

from autotune.core.answer import WayToFit, setting_text
from autotune.core.errors import CannotPredict, ProbeError
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.frameworks.base import Trainer

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


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Searches the neighbourhood of one candidate."""

    job: Job
    space: SearchSpace  # The space without held knobs
    trainer: Trainer
    service: PredictionService
    refuted: frozenset[str] = frozenset()  # Ids of candidates that a measurement showed not to fit
    now: Callable[[], float] = time.monotonic

    def ways_to_fit(self, candidate: Candidate, prediction: Prediction) -> tuple[WayToFit, ...]:
        """Return changes of one kind, or else of two, that surely fit; neutral ones first, then
        by speed. If weight sync is the peak, transfer of the adapter alone precedes them."""
        until = self.now() + MAX_SECONDS
        alone = [knob for knob in (*self.space.knobs, *self.space.remedies) if knob.name not in BATCH_KNOBS]
        possible = [self._smaller_batches(candidate), *(self._knob_changes(knob, candidate) for knob in alone)]
        kinds = sorted((kind for kind in possible if kind.changes), key=lambda kind: kind.learning)
        for number in (1, 2):
            ways: list[WayToFit] = []
            for chosen in itertools.combinations(kinds, number):
                if len(ways) == MAX_WAYS or self.now() > until:
                    break
                if (way := self._mildest(candidate, prediction, chosen)) is not None:
                    ways.append(way)
            if ways:
                return tuple(sorted(ways, key=lambda way: self._rank(way, candidate, prediction)))
        return ()

    def _rank(self, way: WayToFit, candidate: Candidate, prediction: Prediction) -> tuple[bool, bool, float]:
        """Sort key: relief of the sync if that is the peak, effect on learning, speed; an unknown speed comes last."""
        relieves_sync = False
        if prediction.peak_phase is not None and prediction.peak_phase.name == "sync":
            task, changed = self.job.task, self._changed(candidate, way.change)
            before, after = self.trainer.compose(candidate, task), self.trainer.compose(changed, task)
            relieves_sync = after.syncs_adapter_only and not before.syncs_adapter_only
        return not relieves_sync, way.learning, -way.speed_ratio if way.speed_ratio is not None else float("inf")

    def _changed(self, candidate: Candidate, change: KnobValues) -> Candidate:
        return self.trainer.complete(self.space.with_remedies({**candidate.knobs, **change}), self.job.task)

    def _knob_changes(self, knob: Knob, candidate: Candidate) -> Kind:
        learning = knob.effect_under(candidate.settings) == "learning"
        now = candidate.settings.get(knob.name)
        others: list[KnobValue] = [choice for choice in knob.choices if choice != now and choice is not None]
        if now in knob.choices and (learning or knob.memory in ("grows", "shrinks")):
            position = knob.choices.index(now)
            # Learning knobs are ordered by preference, neutral ones by memory.
            others = list(knob.choices[position + 1 :]) if learning else list(knob.choices[:position])[::-1]
        return Kind(changes=tuple({knob.name: choice} for choice in others), learning=learning)

    def _smaller_batches(self, candidate: Candidate) -> Kind:
        """Return smaller micro-batches with more accumulation, at the same global batch."""
        micro, steps = candidate.settings.get(BATCH_KNOBS[0]), candidate.settings.get(BATCH_KNOBS[1])
        if not isinstance(micro, int) or not isinstance(steps, int):
            return Kind(changes=(), learning=False)
        smaller = [size for size in range(micro - 1, 0, -1) if (micro * steps) % size == 0]
        powers = [size for size in smaller if size & (size - 1) == 0] or smaller
        changes = tuple({BATCH_KNOBS[0]: size, BATCH_KNOBS[1]: micro * steps // size} for size in powers)
        return Kind(changes=changes, learning=False)

    def _mildest(self, candidate: Candidate, prediction: Prediction, kinds: Sequence[Kind]) -> WayToFit | None:
        """Return the mildest change of the last kind that fits, beside the strongest of the others."""
        fixed = {name: value for kind in kinds[:-1] for name, value in kind.changes[-1].items()}
        last = kinds[-1].changes
        strongest = self._way(candidate, prediction, {**fixed, **last[-1]})
        if strongest is None:
            return None
        milder = (self._way(candidate, prediction, {**fixed, **change}) for change in last[:-1])
        return next((way for way in milder if way is not None), strongest)

    def _way(self, candidate: Candidate, before: Prediction, change: KnobValues) -> WayToFit | None:
        """Return this change if it is legal and surely fits."""
        other = self._changed(candidate, change)
        if other == candidate or other.id in self.refuted or self.trainer.why_illegal(other, self.job.task) is not None:
            return None
        try:
            prediction = self.service.predict(other)
        except (CannotPredict, ProbeError):  # the ways found so far remain valid
            return None
        if not prediction.fits:
            return None
        learning = self.space.is_learning(change, other.settings)
        ratio, was, becomes = None, before.tokens_per_second, prediction.tokens_per_second
        if not learning and was is not None and becomes is not None:
            ratio = becomes.value / was.value
        effective = {name: value for name, value in change.items() if name in other.settings or value is not None}
        return WayToFit(change=effective, learning=learning, prediction=prediction, speed_ratio=ratio)


def ways_to_fit(
    request: ParsedRequest, baseline: Candidate | None, service: PredictionService, refuted: Iterable[str] = ()
) -> tuple[WayToFit, ...]:
    """Return the changes that make the baseline fit; empty if there is no baseline or no prediction."""
    if baseline is None:
        return ()
    try:
        prediction = service.predict(baseline)
    except (CannotPredict, ProbeError):
        return ()
    job, space, trainer = request.job, request.whole_space, request.trainer
    adviser = Adviser(job=job, space=space, trainer=trainer, service=service, refuted=frozenset(refuted))
    return adviser.ways_to_fit(baseline, prediction)


def as_flags(change: KnobValues, flag: str = "--set") -> str:
    """Return the change as flags of `predict`, or with `--hold` of `run`."""
    return " ".join(f"{flag} {name}={setting_text(value)}" for name, value in change.items())
