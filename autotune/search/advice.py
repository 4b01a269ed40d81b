"""Advice: the cheapest changes that make a candidate fit, with their effect on speed.

Changes are tried by kind: smaller batches, or one knob. Kinds without an effect on learning come
first. Of each kind the strongest change is tried first: if it does not fit, no milder one does. If
it fits, the mildest one that fits is the advice. Only if no kind suffices are pairs of kinds tried:
the strongest change of one with the mildest of the other.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.answer import WayToFit
from autotune.core.errors import CannotPredict, ProbeError
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, setting_text
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH

if TYPE_CHECKING:
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest

MAX_WAYS = 5
MAX_KINDS_TOGETHER = 2

# Settings that change together at one global batch, and count as one change.
BATCH_KNOBS = (MICRO_BATCH, ACCUMULATION, "steps_per_generation")
MAX_SECONDS = 60.0  # Time limit; the ways found by then are returned
KnobValues = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class AdviceKind:
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
    for count in range(1, MAX_KINDS_TOGETHER + 1):
        ways: list[WayToFit] = []
        for combination in itertools.combinations(kinds, count):
            if len(ways) == MAX_WAYS or now() > until:
                break
            way = adviser.mildest(combination)
            if way is not None:
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

    # 1. Kinds of changes.

    def kinds(self) -> list[AdviceKind]:
        """Return the possible kinds of changes, neutral ones first."""
        space = self.request.whole_space
        kinds = [self._smaller_batches()]
        for knob in (*space.knobs, *space.remedies):
            if knob.name not in BATCH_KNOBS:
                kinds.append(self._knob_changes(knob))
        kinds.sort(key=lambda kind: kind.learning)
        return [kind for kind in kinds if kind.changes]

    def _smaller_batches(self) -> AdviceKind:
        """Return smaller micro-batches with more accumulation, at the same global batch; powers of
        two if there are any.
        """
        micro = self.candidate.settings.get(MICRO_BATCH)
        steps = self.candidate.settings.get(ACCUMULATION)
        if not isinstance(micro, int) or not isinstance(steps, int):
            return AdviceKind(changes=(), learning=False)
        changes: list[KnobValues] = []
        to_powers_of_two: list[KnobValues] = []
        for size in range(micro - 1, 0, -1):
            new_steps, remainder = divmod(micro * steps, size)
            if remainder:
                continue
            change = {MICRO_BATCH: size, ACCUMULATION: new_steps}
            changes.append(change)
            if size & (size - 1) == 0:
                to_powers_of_two.append(change)
        return AdviceKind(changes=tuple(to_powers_of_two or changes), learning=False)

    def _knob_changes(self, knob: Knob) -> AdviceKind:
        settings = self.candidate.settings
        current = settings.get(knob.name)
        learning = knob.effect_under(settings) == "learning"
        is_ordered = learning or knob.memory in ("grows", "shrinks")
        choices = knob.choices
        if current not in choices or not is_ordered:
            choices = tuple(choice for choice in choices if choice not in (current, None))
        elif learning:  # ordered by preference
            choices = choices[choices.index(current) + 1 :]
        else:  # ordered by memory
            choices = choices[: choices.index(current)][::-1]
        return AdviceKind(
            changes=tuple({knob.name: choice} for choice in choices), learning=learning
        )

    # 2. Ways to fit.

    def mildest(self, kinds: Sequence[AdviceKind]) -> WayToFit | None:
        """Return the mildest change of the last kind that fits, together with the strongest of the
        other kinds.
        """
        fixed: dict[str, KnobValue] = {}
        for kind in kinds[:-1]:
            fixed |= kind.changes[-1]
        *milder, strongest = kinds[-1].changes
        strongest_way = self._way({**fixed, **strongest})
        if strongest_way is None:
            return None
        for change in milder:
            way = self._way({**fixed, **change})
            if way is not None:
                return way
        return strongest_way

    def _way(self, change: KnobValues) -> WayToFit | None:
        """Return this change if it is legal and surely fits."""
        changed = self._changed(change)
        request = self.request
        if changed == self.candidate or changed.id in self.refuted:
            return None
        if request.trainer.why_illegal(changed, request.job.task) is not None:
            return None
        try:
            prediction = self.service.predict(changed)
        except (CannotPredict, ProbeError):  # the ways found so far remain valid
            return None
        if not prediction.fits:
            return None
        effective = {}
        for name, value in change.items():
            if name in changed.settings or value is not None:
                effective[name] = value
        learning = request.whole_space.is_learning(change, changed.settings)
        return WayToFit(
            change=effective,
            learning=learning,
            prediction=prediction,
            speed_ratio=None if learning else self._speed_ratio(prediction),
        )

    def _changed(self, change: KnobValues) -> Candidate:
        knobs = self.request.whole_space.with_remedies({**self.candidate.knobs, **change})
        return self.request.trainer.complete(knobs, self.request.job.task)

    def _speed_ratio(self, prediction: Prediction) -> float | None:
        before = self.prediction.tokens_per_second
        after = prediction.tokens_per_second
        if before is None or after is None:
            return None
        return after.value / before.value

    # 3. Order.

    def rank(self, way: WayToFit) -> tuple[bool, bool, float]:
        """Sort key: relief of the sync if that is the peak, effect on learning, speed; an
        unknown speed comes last.
        """
        slowness = math.inf if way.speed_ratio is None else -way.speed_ratio
        return not self._relieves_sync(way), way.learning, slowness

    def _relieves_sync(self, way: WayToFit) -> bool:
        peak_phase = self.prediction.peak_phase
        if peak_phase is None or peak_phase.name != "sync":
            return False
        trainer = self.request.trainer
        task = self.request.job.task
        before = trainer.compose(self.candidate, task)
        after = trainer.compose(self._changed(way.change), task)
        return after.syncs_adapter_only and not before.syncs_adapter_only


def as_flags(change: KnobValues, flag: str = "--set") -> str:
    """Return the change as flags of `predict`, or with `--hold` of `run`."""
    return " ".join(f"{flag} {name}={setting_text(value)}" for name, value in change.items())
