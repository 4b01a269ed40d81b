"""Predictions where something is not known: facts of the user's, the lengths of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate, KnobValue

VERDICTS = {True: "fits", None: "may or may not fit", False: "does not fit"}

ROW_LENGTHS = (
    "real completion lengths: micro-batches hold only real tokens, and not all rows need have the"
    " longest length"
)

MAX_DRAWN = 4096  # rows drawn of a larger generation batch


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
        depends_on=(
            ()
            if fits is not None
            else (ROW_LENGTHS, *(cause for cause in longest.depends_on if cause != ROW_LENGTHS))
        ),
    )


def fullest_rows(
    composition: Composition, completions: TokenLengths, prompts: TokenLengths | None
) -> tuple[int, int] | None:
    """Return prompt and completion tokens of a row in the fullest micro-batch. None: they are
    always the longest.

    Padded rows have the length of the longest of their rank's batch, packed ones their own: the
    fullest micro-batch has the largest mean. A token budget is filled at any lengths. Unknown
    prompts are the longest.
    """
    if composition.token_budget:
        return None
    longest_prompt, rows = (
        composition.prompt_length,
        min(MAX_DRAWN, composition.generation_batch // composition.ranks),
    )
    prompts = (
        TokenLengths.of("", [longest_prompt]) if prompts is None else prompts.up_to(longest_prompt)
    )
    completions = completions.up_to(composition.completion_length)
    if not composition.packs_rows:
        return tuple(round(one.expected_longest(max(1, rows))) for one in (prompts, completions))  # type: ignore[return-value]
    each = min(composition.micro_batch, max(1, rows))
    drawn = list(
        zip(prompts.draw(max(each, rows), seed=1), completions.draw(max(each, rows)), strict=True)
    )
    batches = [drawn[start : start + each] for start in range(0, len(drawn) - each + 1, each)]
    fullest = max(batches, key=lambda batch: sum(map(sum, batch)))
    return tuple(max(1, round(fmean(part))) for part in zip(*fullest, strict=True))  # type: ignore[return-value]


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
        torch_peak_allocated_bytes=_hull(
            top.torch_peak_allocated_bytes, [one.torch_peak_allocated_bytes for one in everyone]
        ),
        torch_peak_reserved_bytes=_hull(
            top.torch_peak_reserved_bytes, [one.torch_peak_reserved_bytes for one in everyone]
        ),
        phases=tuple(_phase(phase, everyone) for phase in top.phases),
        tokens_per_second=None,
        assumptions=(*top.assumptions, f"worst case of the unknown facts: {assumed}"),
    )


def _hull(top: Estimate, several: Sequence[Estimate]) -> Estimate:
    return Estimate(
        value=top.value, low=min(one.low for one in several), high=max(one.high for one in several)
    )


def _phase(phase: PhasePrediction, everyone: Sequence[Prediction]) -> PhasePrediction:
    same = [
        other.peak_bytes for one in everyone for other in one.phases if other.name == phase.name
    ]
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
            verdicts = {
                value: next(iter(found)) if len(found) == 1 else None
                for value, found in by_value.items()
            }
            texts = (f"{VERDICTS[verdict]} with {value}" for value, verdict in verdicts.items())
            yield f"{name}, which is not given: {', '.join(texts)}"
