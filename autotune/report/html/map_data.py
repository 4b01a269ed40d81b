"""Data of the map: every candidate of a space in columns of integers.

A candidate is a row. Column of a knob: the number of its value, -1 without the knob, or one number
where all rows have the same. Texts, memory of phases and memory profiles are stored once each;
columns hold their numbers. Example with two candidates that differ in one knob:

    knobs     [{name: "beta", column: 0}, {name: "num_generations", column: [0, 1]}]
    fits      [1, 0]        1: it fits, 0: it does not, 2: undecided, 3: it stops with an error
    verdict   [[0, 1], [2]] numbers of `texts`, which "; " joins
    profile   [0, 1]        of `profiles`: the limit, then for each phase a number of `phases`
"""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import yaml

from autotune.core.measurement import PHASES
from autotune.core.prediction import PhasePrediction, Prediction
from autotune.core.space import Candidate, KnobValue, is_number, setting_text
from autotune.core.units import MIB
from autotune.report.verdict_text import verdict_text
from autotune.search.predicted_space import PredictedSpace

Stored = TypeVar("Stored", bound=Hashable)

NO_VALUE = -1  # a knob that the candidate does not have, or an unknown figure
PREDICTED_COLUMNS = ("fits", "verdict", "speed", "peak", "profile")
VERDICT_CODES = {False: 0, True: 1, None: 2}
STOPS = 3  # whatever its peak: the engine refuses to start
PARTS = "; "  # between the parts of a verdict


class Numbered(Generic[Stored]):
    """Distinct values in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[Stored, int] = {}

    def number_of(self, value: Stored) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[Stored]:
        return list(self._numbers)


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """Values that several candidates share, each stored once."""

    texts: Numbered[str] = field(default_factory=Numbered)
    phases: Numbered[tuple[int, ...]] = field(default_factory=Numbered)
    profiles: Numbered[tuple[int, ...]] = field(default_factory=Numbered)


def map_data(space: PredictedSpace) -> dict[str, Any]:
    """Return the page's data as JSON."""
    # 1. One value of each column for every candidate.
    shared = SharedValues()
    columns: dict[str, list[object]] = {name: [] for name in PREDICTED_COLUMNS}
    for candidate in space.candidates:
        prediction = space.predictions[candidate.id]
        row = _row(prediction, shared)
        for name, value in zip(PREDICTED_COLUMNS, row, strict=True):
            columns[name].append(value)

    # 2. The knobs, what the columns refer to, and the candidates with a button.
    best = NO_VALUE
    if space.best is not None:
        best = space.candidates.index(space.best)
    return {
        **columns,
        "knobs": _knobs(space),
        "texts": shared.texts.values(),
        "phase_names": PHASES,
        "phases": shared.phases.values(),
        "profiles": shared.profiles.values(),
        "start": space.candidates.index(space.start),
        "best": best,
    }


def _row(prediction: Prediction, shared: SharedValues) -> tuple[object, ...]:
    """Return a candidate's value in each of PREDICTED_COLUMNS."""
    verdict = []
    for part in verdict_text(prediction).split(PARTS):
        verdict.append(shared.texts.number_of(part))
    memory = _memory(prediction, shared)
    return (
        _verdict_code(prediction),
        verdict,
        _speed(prediction),
        _mib(prediction.peak_memory_bytes.value),
        shared.profiles.number_of(memory),
    )


def _verdict_code(prediction: Prediction) -> int:
    if prediction.failure is not None:
        return STOPS
    return VERDICT_CODES[prediction.fits]


def _speed(prediction: Prediction) -> int:
    """Return tokens/s, rounded like the verdict's."""
    rate = prediction.ranking_rate
    return NO_VALUE if rate is None else round(rate.value)


def _memory(prediction: Prediction, shared: SharedValues) -> tuple[int, ...]:
    """Return the limit in MiB, then for each name in PHASES the number of its figures."""
    numbers = {}
    for phase in prediction.phases:
        figures = _phase_mib(phase)
        numbers[phase.name] = shared.phases.number_of(figures)

    profile = [_mib(prediction.deciding_limit.value)]
    for name in PHASES:
        number = numbers.get(name, NO_VALUE)
        profile.append(number)
    return tuple(profile)


def _phase_mib(phase: PhasePrediction) -> tuple[int, ...]:
    """Return what is in use at the phase's peak, the peak, and its upper bound, in MiB."""
    peak = phase.peak_bytes
    live_bytes = phase.live_bytes
    if live_bytes is None:
        live_bytes = round(peak.value)
    return (
        _mib(live_bytes),
        _mib(peak.value),
        _mib(peak.high),
    )


def _mib(size_bytes: float) -> int:
    return round(size_bytes / MIB)


# Knobs.


def _knobs(space: PredictedSpace) -> list[dict[str, Any]]:
    """Return the knobs that any candidate has, with their values and columns."""
    learning = space.job.space.learning_knobs(space.start.settings)
    knobs = []
    for knob in space.job.space.knobs:
        values = _values(knob.name, space.candidates)
        if not values:
            continue
        column = _column(knob.name, values, space.candidates)
        entries: int | list[int] = column
        if len(set(column)) == 1:
            entries = column[0]
        texts = []
        for value in values:
            texts.append(_texts(knob.name, value))
        row = {
            "name": knob.name,
            "says": knob.says,
            "learning": knob in learning,
            "numeric": all(map(is_number, values)),
            "values": texts,
            "column": entries,
        }
        knobs.append(row)
    return knobs


def _values(name: str, candidates: Sequence[Candidate]) -> list[KnobValue]:
    """Return the values of a knob, numbers last and in ascending order."""
    by_text: dict[str, KnobValue] = {}
    for candidate in candidates:
        if name in candidate.knobs:
            value = candidate.knobs[name]
            by_text.setdefault(setting_text(value), value)

    numbers: list[int | float] = []
    options: list[KnobValue] = []
    for value in by_text.values():
        if is_number(value):
            numbers.append(value)
        else:
            options.append(value)
    return [*options, *sorted(numbers)]


def _column(
    name: str,
    values: Sequence[KnobValue],
    candidates: Sequence[Candidate],
) -> list[int]:
    """Return the number of each candidate's value."""
    numbers: dict[str, int] = {}
    for value in values:
        numbers[setting_text(value)] = len(numbers)
    column = []
    for candidate in candidates:
        number = NO_VALUE
        if name in candidate.knobs:
            text = setting_text(candidate.knobs[name])
            number = numbers[text]
        column.append(number)
    return column


def _texts(name: str, value: KnobValue) -> dict[str, str]:
    """Return a value as a label, as a line of YAML (empty for null), and as an argument."""
    label = setting_text(value)
    argument = f"{name}={label}"
    line = ""
    if value is not None:
        line = yaml.safe_dump({name: value}, allow_unicode=True)
    return {
        "label": label,
        "yaml": line,
        "set": shlex.join(["--set", argument]),
    }
