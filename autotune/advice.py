"""The cheapest changes that would make a candidate fit: what to move, what it leaves free, what it costs in speed.

Each kind of change is tried at its strongest first: where that does not fit, nothing milder of the kind does. Where it does,
the mildest that fits is the advice. Kinds are tried from those that leave what is learned alone to those that do not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.candidate import Candidate, KnobValue
from autotune.errors import CannotPredict, RigError
from autotune.forecast import WayToFit
from autotune.forecasting import Foresees
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.space import Knob, SearchSpace
from autotune.trainers.base import Trainer

MOST = 5
"""More than this is a list and no advice."""

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
"""Settings that move together, at one global batch, and count as one change."""

SECONDS = 60.0
"""Kinds of changes are tried until so much time has passed; what was found by then is told."""

Change = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Changes of one thing, from the mildest to the strongest."""

    changes: tuple[Change, ...]
    learning: bool


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Looks around one candidate."""

    question: Question
    space: SearchSpace
    """What could be moved and where to, as it was before anything was held."""

    trainer: Trainer
    foresight: Foresees
    now: Callable[[], float] = time.monotonic

    def ways_to_fit(self, candidate: Candidate, prediction: Prediction) -> tuple[WayToFit, ...]:
        """Changes of one thing, or else of two, after which it surely fits; neutral ones first, and of these the faster. Where
        weight sync is the peak, an adapter handed over alone comes before all of them."""
        until = self.now() + SECONDS
        kinds = list(self._kinds(candidate))
        for number in (1, 2):
            ways: list[WayToFit] = []
            for chosen in itertools.combinations(kinds, number):
                if len(ways) == MOST or (self.now() > until):
                    break
                ways.extend(self._mildest(candidate, prediction, chosen))
            if ways:
                return tuple(sorted(ways, key=lambda way: (not self._relieves_sync(way, candidate, prediction), *_cost(way))))
        return ()

    def _relieves_sync(self, way: WayToFit, candidate: Candidate, prediction: Prediction) -> bool:
        """Where handing weights to the engine takes the most, handing over an adapter alone is what mends the cause."""
        if prediction.peak_phase is None or prediction.peak_phase.name != "sync":
            return False
        job, changed = self.question.job, self._changed(candidate, way.change)
        return self.trainer.compose(changed, job).pushes_adapter and not self.trainer.compose(candidate, job).pushes_adapter

    def _changed(self, candidate: Candidate, change: Change) -> Candidate:
        return self.trainer.complete(self.space.with_remedies({**candidate.knobs, **change}), self.question.job)

    def _kinds(self, candidate: Candidate) -> Iterator[Kind]:
        """Neutral ones first, then what changes what is learned, in the space's own order."""
        alone = [knob for knob in (*self.space.knobs, *self.space.remedies) if knob.name not in BATCH]
        kinds = [self._batch(candidate), *(self._of(knob, candidate) for knob in alone)]
        yield from sorted((kind for kind in kinds if kind.changes), key=lambda kind: kind.learning)

    def _of(self, knob: Knob, candidate: Candidate) -> Kind:
        learning = knob.effect_under(candidate.settings) == "learning"
        now = candidate.settings.get(knob.name)
        others: list[KnobValue] = [choice for choice in knob.choices if choice != now and choice is not None]
        if now in knob.choices and (learning or knob.memory in ("grows", "shrinks")):
            place = knob.choices.index(now)
            # Learning knobs run from the most preferred on, neutral ones from the least memory on.
            others = list(knob.choices[place + 1 :]) if learning else list(knob.choices[:place])[::-1]
        return Kind(changes=tuple({knob.name: choice} for choice in others), learning=learning)

    def _batch(self, candidate: Candidate) -> Kind:
        """Smaller micro-batches with more accumulation: what is learned from stays one global batch."""
        micro, steps = candidate.settings.get(BATCH[0]), candidate.settings.get(BATCH[1])
        if not isinstance(micro, int) or not isinstance(steps, int):
            return Kind(changes=(), learning=False)
        smaller = [size for size in range(micro - 1, 0, -1) if (micro * steps) % size == 0]
        halved = [size for size in smaller if size & (size - 1) == 0] or smaller
        return Kind(changes=tuple({BATCH[0]: size, BATCH[1]: micro * steps // size} for size in halved), learning=False)

    def _mildest(self, candidate: Candidate, prediction: Prediction, kinds: Sequence[Kind]) -> Iterator[WayToFit]:
        """At most one way: of the last kind the mildest that fits, of those before it the strongest."""
        fixed = {name: value for kind in kinds[:-1] for name, value in kind.changes[-1].items()}
        last = kinds[-1].changes
        strongest = self._way(candidate, prediction, {**fixed, **last[-1]})
        if strongest is None:
            return
        milder = (self._way(candidate, prediction, {**fixed, **change}) for change in last[:-1])
        yield next((way for way in milder if way is not None), strongest)

    def _way(self, candidate: Candidate, before: Prediction, change: Change) -> WayToFit | None:
        """This change, if it is legal and surely fits."""
        other = self._changed(candidate, change)
        if other == candidate or self.trainer.why_illegal(other, self.question.job) is not None:
            return None
        try:
            prediction = self.foresight.predict(other)
        except (CannotPredict, RigError):  # what can't be followed is no advice, and takes nothing from what is known already
            return None
        if not prediction.fits:
            return None
        learning = self.space.is_learning(change, other.settings)
        ratio = None if learning else _ratio(before, prediction)
        return WayToFit(change=_told(change, other), learning=learning, prediction=prediction, speed_ratio=ratio)


def as_flags(change: Mapping[str, KnobValue]) -> str:
    """The change as it is typed for `predict`."""
    return " ".join(f"--set {name}={_typed(value)}" for name, value in change.items())


def _told(change: Change, after: Candidate) -> dict[str, KnobValue]:
    return {name: value for name, value in change.items() if name in after.settings or value is not None}


def _ratio(now: Prediction, then: Prediction) -> float | None:
    if now.tokens_per_second is None or then.tokens_per_second is None:
        return None
    return then.tokens_per_second.value / now.tokens_per_second.value


def _cost(way: WayToFit) -> tuple[bool, float]:
    """What is learned first, then speed: a change of unknown cost comes after those that are known."""
    return way.learning, -(way.speed_ratio if way.speed_ratio is not None else float("-inf"))


def _typed(value: KnobValue) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
