"""Data of the map: every candidate of a space in columns of integers.

A candidate is a row. Column of a knob: the number of its value, -1 without the knob, or one number
where all rows have the same. Texts, memory of phases and memory profiles are stored once each;
columns hold their numbers. Example with two candidates that differ in one knob:

    knobs     [{name: "beta", column: 0}, {name: "num_generations", column: [0, 1]}]
    fits      [1, 0]        1: it fits, 0: it does not, 2: undecided
    verdict   [[0, 1], [2]] numbers of `texts`, which "; " joins
    profile   [0, 1]        of `profiles`: the limit, then a number of `phases` for each phase name
"""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeGuard, TypeVar

import yaml

from autotune.core.prediction import PhasePrediction, Prediction
from autotune.core.space import Candidate, KnobValue, setting_text
from autotune.core.units import MIB
from autotune.report.verdict_text import verdict_text
from autotune.search.predicted_space import PredictedSpace

T = TypeVar("T", bound=Hashable)

ABSENT = -1  # a knob that the candidate does not have, or an unknown figure
FITS = {False: 0, True: 1, None: 2}
PARTS = "; "  # between the parts of a verdict


class Numbered(Generic[T]):
    """Distinct values in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def number_of(self, value: T) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[T]:
        return list(self._numbers)


def map_data(space: PredictedSpace) -> dict[str, Any]:
    """Return the page's data as JSON."""
    texts = Numbered[str]()
    names = Numbered[str]()
    phases = Numbered[tuple[int, ...]]()
    profiles = Numbered[tuple[int, ...]]()
    fits, verdict, speed, peak, profile = [], [], [], [], []
    for candidate in space.candidates:
        prediction = space.predictions[candidate.id]
        fits.append(FITS[prediction.fits])
        parts = verdict_text(prediction).split(PARTS)
        verdict.append([texts.number_of(part) for part in parts])
        speed.append(_speed(prediction))
        peak.append(round(prediction.peak_memory_bytes.value / MIB))
        figures = _memory(prediction, names, phases)
        profile.append(profiles.number_of(figures))
    return {
        "knobs": _knobs(space),
        "texts": texts.values(),
        "phase_names": names.values(),
        "phases": phases.values(),
        "profiles": profiles.values(),
        "fits": fits,
        "verdict": verdict,
        "speed": speed,
        "peak": peak,
        "profile": profile,
        "start": space.candidates.index(space.start),
        "best": ABSENT if space.best is None else space.candidates.index(space.best),
    }


def _speed(prediction: Prediction) -> int:
    """Return tokens/s, rounded like the verdict's."""
    rate = prediction.ranking_rate
    return ABSENT if rate is None else round(rate.value)


def _memory(
    prediction: Prediction,
    names: Numbered[str],
    phases: Numbered[tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the limit in MiB, then the number of each phase's figures, by the phase's number."""
    figures_by_name = {}
    for phase in prediction.phases:
        figures_by_name[names.number_of(phase.name)] = phases.number_of(_phase_mib(phase))
    limit = round(prediction.deciding_limit.value / MIB)
    numbers = range(len(names.values()))
    return limit, *(figures_by_name.get(number, ABSENT) for number in numbers)


def _phase_mib(phase: PhasePrediction) -> tuple[int, ...]:
    """Return what is in use at the phase's peak, the peak, and its upper bound, in MiB."""
    live = phase.live_bytes
    peak = phase.peak_bytes
    sizes = (peak.value if live is None else live, peak.value, peak.high)
    return tuple(round(size / MIB) for size in sizes)


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
        is_constant = len(set(column)) == 1
        knobs.append(
            {
                "name": knob.name,
                "says": knob.says,
                "learning": knob in learning,
                "numeric": all(map(_is_number, values)),
                "values": [_texts(knob.name, value) for value in values],
                "column": column[0] if is_constant else column,
            }
        )
    return knobs


def _values(name: str, candidates: Sequence[Candidate]) -> list[KnobValue]:
    """Return the values of a knob, numbers last and in ascending order."""
    by_text: dict[str, KnobValue] = {}
    for candidate in candidates:
        if name in candidate.knobs:
            value = candidate.knobs[name]
            by_text.setdefault(setting_text(value), value)
    values = list(by_text.values())
    names = [value for value in values if not _is_number(value)]
    return [*names, *sorted(filter(_is_number, values))]


def _column(
    name: str,
    values: Sequence[KnobValue],
    candidates: Sequence[Candidate],
) -> list[int]:
    """Return the number of each candidate's value."""
    numbers = {setting_text(value): number for number, value in enumerate(values)}
    column = []
    for candidate in candidates:
        number = ABSENT
        if name in candidate.knobs:
            number = numbers[setting_text(candidate.knobs[name])]
        column.append(number)
    return column


def _is_number(value: KnobValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(name: str, value: KnobValue) -> dict[str, str]:
    """Return a value as a label, as a line of YAML (empty for null), and as an argument."""
    line = ""
    if value is not None:
        line = yaml.safe_dump({name: value}, allow_unicode=True)
    return {
        "label": setting_text(value),
        "yaml": line,
        "set": shlex.join(["--set", f"{name}={setting_text(value)}"]),
    }
