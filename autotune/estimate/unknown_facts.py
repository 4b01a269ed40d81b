"""Combined predictions of one candidate: over unknown facts, over row lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate, KnobValue

VERDICTS = {True: "fits", None: "may or may not fit", False: "does not fit"}

ROW_LENGTHS = "real completion lengths: micro-batches hold only real tokens, and not all rows need have the longest length"


@dataclass(frozen=True, kw_only=True)
class FactVariant:
    """Assignment of values to the unknown facts."""

    facts: Mapping[str, KnobValue]
    candidate: Candidate
    prediction: Prediction


def with_lower_bound(longest: Prediction, shortest: Prediction) -> Prediction:
    """Return the longest rows' prediction, with intervals down to the shortest rows'.

    A micro-batch of real tokens alone has a size that depends on the data: at most the longest
    rows, at least one row of the longest length beside nearly empty ones. The verdict stays only
    if both agree.
    """
    if longest.fits is True or shortest.peak_memory_bytes.low >= longest.peak_memory_bytes.low:
        return longest
    fits = False if shortest.fits is False else None
    both = (longest, shortest)

    def down_to(figure: Callable[[Prediction], Estimate]) -> Estimate:
        return dataclasses.replace(figure(longest), low=min(figure(one).low for one in both))

    return dataclasses.replace(
        longest,
        fits=fits,
        peak_memory_bytes=down_to(lambda one: one.peak_memory_bytes),
        torch_peak_allocated_bytes=down_to(lambda one: one.torch_peak_allocated_bytes),
        torch_peak_reserved_bytes=down_to(lambda one: one.torch_peak_reserved_bytes),
        depends_on=() if fits is not None else (ROW_LENGTHS, *(cause for cause in longest.depends_on if cause != ROW_LENGTHS)),
    )


def worst(variants: Sequence[FactVariant]) -> FactVariant:
    """Return the variant that needs most memory."""
    return max(variants, key=lambda variant: variant.prediction.peak_memory_bytes.value)


def agreed(variants: Sequence[FactVariant]) -> Prediction:
    """Return the worst variant with intervals over all; a verdict only if all agree."""
    if len(variants) == 1:
        return variants[0].prediction
    top, everyone = worst(variants).prediction, [variant.prediction for variant in variants]
    verdicts = {one.fits for one in everyone}
    fits = verdicts.pop() if len(verdicts) == 1 else None
    causes = (*_deciding(variants), *(cause for one in everyone for cause in one.depends_on))
    assumed = " ".join(f"{name}={value}" for name, value in worst(variants).facts.items())
    return dataclasses.replace(
        top,
        fits=fits,
        failure=top.failure if fits is False else None,
        depends_on=() if fits is not None else tuple(dict.fromkeys(causes)),
        peak_memory_bytes=_hull(top.peak_memory_bytes, [one.peak_memory_bytes for one in everyone]),
        torch_peak_allocated_bytes=_hull(top.torch_peak_allocated_bytes, [one.torch_peak_allocated_bytes for one in everyone]),
        torch_peak_reserved_bytes=_hull(top.torch_peak_reserved_bytes, [one.torch_peak_reserved_bytes for one in everyone]),
        phases=tuple(_phase(phase, everyone) for phase in top.phases),
        tokens_per_second=None,
        assumptions=(*top.assumptions, f"worst case of the unknown facts: {assumed}"),
    )


def _hull(top: Estimate, several: Sequence[Estimate]) -> Estimate:
    return Estimate(value=top.value, low=min(one.low for one in several), high=max(one.high for one in several))


def _phase(phase: PhasePrediction, everyone: Sequence[Prediction]) -> PhasePrediction:
    same = [other.peak_bytes for one in everyone for other in one.phases if other.name == phase.name]
    return dataclasses.replace(phase, peak_bytes=_hull(phase.peak_bytes, same), seconds=None)


def _deciding(variants: Sequence[FactVariant]) -> Iterator[str]:
    """Yield the facts that change the verdict when they alone change."""
    for name in variants[0].facts:
        by_value: dict[KnobValue, set[bool | None]] = {}
        by_others: dict[frozenset[tuple[str, KnobValue]], set[bool | None]] = {}
        for one in variants:
            others = frozenset((fact, value) for fact, value in one.facts.items() if fact != name)
            by_value.setdefault(one.facts[name], set()).add(one.prediction.fits)
            by_others.setdefault(others, set()).add(one.prediction.fits)
        if any(len(found) > 1 for found in by_others.values()):
            verdicts = {value: next(iter(found)) if len(found) == 1 else None for value, found in by_value.items()}
            texts = (f"{VERDICTS[verdict]} with {value}" for value, verdict in verdicts.items())
            yield f"{name}, which is not given: {', '.join(texts)}"
