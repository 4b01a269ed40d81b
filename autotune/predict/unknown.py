"""What is not known of a configuration: every way in which it can be, predicted, and what all of them agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.candidate import Candidate, KnobValue
from autotune.prediction import Estimate, PhasePrediction, Prediction

VERDICTS = {True: "fits", None: "may or may not fit", False: "does not fit"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way in which what is not known can be."""

    facts: Mapping[str, KnobValue]
    candidate: Candidate
    prediction: Prediction


def worst(ways: Sequence[Way]) -> Way:
    """The one that needs most memory."""
    return max(ways, key=lambda way: way.prediction.peak_memory_bytes.value)


def agreed(ways: Sequence[Way]) -> Prediction:
    """The worst way's figures with intervals that hold every way's, and a verdict only where all have the same."""
    if len(ways) == 1:
        return ways[0].prediction
    top, everyone = worst(ways).prediction, [way.prediction for way in ways]
    verdicts = {one.fits for one in everyone}
    fits = verdicts.pop() if len(verdicts) == 1 else None
    return dataclasses.replace(
        top,
        fits=fits,
        failure=top.failure if fits is False else None,
        depends_on=() if fits is not None else tuple(dict.fromkeys((*_deciding(ways), *_within(ways)))),
        peak_memory_bytes=_hull(top, everyone, lambda one: one.peak_memory_bytes),
        torch_peak_allocated_bytes=_hull(top, everyone, lambda one: one.torch_peak_allocated_bytes),
        torch_peak_reserved_bytes=_hull(top, everyone, lambda one: one.torch_peak_reserved_bytes),
        phases=tuple(_phase(phase, everyone) for phase in top.phases),
        tokens_per_second=None,
        assumptions=(*top.assumptions, f"of what is not given, the most memory: {_told(worst(ways).facts)}"),
    )


def _hull(top: Prediction, everyone: Sequence[Prediction], figure: Callable[[Prediction], Estimate]) -> Estimate:
    found = [figure(one) for one in everyone]
    return Estimate(value=figure(top).value, low=min(one.low for one in found), high=max(one.high for one in found))


def _phase(phase: PhasePrediction, everyone: Sequence[Prediction]) -> PhasePrediction:
    same = [other.peak_bytes for one in everyone for other in one.phases if other.name == phase.name]
    peak = Estimate(value=phase.peak_bytes.value, low=min(one.low for one in same), high=max(one.high for one in same))
    return dataclasses.replace(phase, peak_bytes=peak, seconds=None)


def _deciding(ways: Sequence[Way]) -> Iterator[str]:
    """Facts on which the verdict hangs: moving one alone changes it."""
    for name in ways[0].facts:
        values = list(dict.fromkeys(way.facts[name] for way in ways))
        said = [f"{VERDICTS[_verdict(ways, name, value)]} with {value}" for value in values]
        if any(_differ(one, other, name) for one in ways for other in ways):
            yield f"{name}, which is not given: {', '.join(said)}"


def _verdict(ways: Sequence[Way], name: str, value: KnobValue) -> bool | None:
    """With this value, whatever the other facts are."""
    found = {way.prediction.fits for way in ways if way.facts[name] == value}
    return found.pop() if len(found) == 1 else None


def _differ(one: Way, other: Way, name: str) -> bool:
    others = [fact for fact in one.facts if fact != name]
    return all(one.facts[fact] == other.facts[fact] for fact in others) and one.prediction.fits != other.prediction.fits


def _within(ways: Sequence[Way]) -> Iterator[str]:
    """What single ways hang on, where one of them is undecided itself."""
    for way in ways:
        yield from way.prediction.depends_on


def _told(facts: Mapping[str, KnobValue]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())
