"""Predictions where something is not known: facts, the lengths of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths
from autotune.core.errors import BadInput
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate, KnobValue
from autotune.core.units import GIB
from autotune.estimate.unknown_facts import (
    ROW_LENGTHS,
    FactVariant,
    agreed,
    fullest_rows,
    with_lower_bound,
    worst,
)
from autotune.request.flags import Flags
from autotune.request.origins import values_of
from autotune.request.request_parser import read_sources
from tests.estimate.test_predictor import predicted


def prediction(
    low: float,
    value: float,
    high: float,
    *,
    fits: bool | None,
    limit: int = 40 * GIB,
) -> Prediction:
    peak = Estimate(
        value=value * GIB,
        low=low * GIB,
        high=high * GIB,
    )
    return Prediction(
        candidate_id="one",
        basis="traced",
        fits=fits,
        limit_bytes=limit,
        peak_memory_bytes=peak,
        torch_peak_allocated_bytes=peak,
        torch_peak_reserved_bytes=peak,
        depends_on=() if fits is not None else ("the context",),
    )


def variant(facts: Mapping[str, KnobValue], prediction: Prediction) -> FactVariant:
    return FactVariant(
        facts=facts,
        candidate=Candidate(
            knobs=facts,
            settings=facts,
            load={},
        ),
        prediction=prediction,
    )


SMALL, LARGE = prediction(9, 10, 11, fits=True), prediction(49, 50, 52, fits=False)


def test_one_variant_is_unchanged() -> None:
    assert agreed([variant({}, SMALL)]) is SMALL


def test_the_interval_covers_all_variants_and_the_value_is_the_worst() -> None:
    agreement = agreed([variant({"batch": 1}, SMALL), variant({"batch": 8}, LARGE)])
    assert agreement.peak_memory_bytes == Estimate(
        value=50 * GIB,
        low=9 * GIB,
        high=52 * GIB,
    )
    assert worst([variant({"batch": 1}, SMALL), variant({"batch": 8}, LARGE)]).facts == {"batch": 8}


def test_the_deciding_fact_is_named() -> None:
    variants = [
        variant({"batch": batch, "seed": seed}, SMALL if batch == 1 else LARGE)
        for batch in (1, 8)
        for seed in (1, 2)
    ]
    agreement = agreed(variants)
    assert agreement.fits is None
    assert agreement.depends_on == ("batch, which is not given: fits with 1, does not fit with 8",)


def test_agreement_gives_a_verdict_without_causes() -> None:
    larger = dataclasses.replace(LARGE, peak_memory_bytes=Estimate.exactly(60 * GIB))
    agreement = agreed([variant({"batch": 4}, LARGE), variant({"batch": 8}, larger)])
    assert agreement.fits is False and agreement.depends_on == ()


def test_an_undecided_variant_adds_its_own_causes() -> None:
    agreement = agreed(
        [variant({"batch": 1}, SMALL), variant({"batch": 2}, prediction(38, 40, 42, fits=None))]
    )
    assert agreement.depends_on == (
        "batch, which is not given: fits with 1, may or may not fit with 2",
        "the context",
    )


def test_every_combination_is_a_variant() -> None:
    flags = Flags(unknown=("a=1,2", "b=true,null"), set=("c=3",))
    variants = read_sources(flags).variants()
    assert [facts for facts, _ in variants] == [
        {"a": 1, "b": True},
        {"a": 1, "b": None},
        {"a": 2, "b": True},
        {"a": 2, "b": None},
    ]
    settings = variants[1].sources.values.settings
    assert values_of(settings.set) == {"c": 3, "a": 1, "b": None} and settings.unknown == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags(unknown=("a=1,2",), set=("a=1",)), "both given and unknown"),
        (Flags(unknown=("a=,",)), "--unknown a was given no value"),
        (Flags(unknown=("a=1,2,3,4,5", "b=1,2,3,4")), "20 ways"),
    ],
)
def test_invalid_unknown_facts_are_refused(flags: Flags, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_sources(flags).variants()


LONG = predicted()


def at(value: float, fits: bool | None) -> Prediction:
    peak = Estimate(
        value=value,
        low=0.9 * value,
        high=1.1 * value,
    )
    return dataclasses.replace(
        LONG,
        peak_memory_bytes=peak,
        fits=fits,
        depends_on=("else",) if fits is None else (),
    )


def test_a_fit_of_the_longest_rows_is_a_fit() -> None:
    assert with_lower_bound(at(50, True), at(10, True)) == at(50, True)


def test_a_misfit_of_one_row_is_a_misfit() -> None:
    combined = with_lower_bound(at(200, False), at(120, False))
    assert combined.fits is False and combined.depends_on == ()


def test_otherwise_the_verdict_depends_on_the_data() -> None:
    combined = with_lower_bound(at(200, False), at(50, True))
    assert combined.fits is None and combined.depends_on == (ROW_LENGTHS,)
    assert combined.peak_memory_bytes == dataclasses.replace(
        at(200, False).peak_memory_bytes, low=at(50, True).peak_memory_bytes.low
    )
    assert with_lower_bound(at(100, None), at(50, True)).depends_on == (ROW_LENGTHS, "else")


COMPLETIONS = TokenLengths.lognormal("test", 300, 600)
PROMPTS = TokenLengths.lognormal("test", 100, 150)


def composed(**about: Any) -> Composition:
    shape = {
        "ranks": 2,
        "micro_batch": 8,
        "accumulation": 4,
        "generation_batch": 128,
        "prompt_length": 512,
    }
    return Composition(
        **{
            "residents": (),
            "completion_length": 1024,
            "checkpointing": True,
            "optimizer": "adamw",
            "packs_rows": True,
            **shape,
            **about,
        }
    )


def test_packed_rows_have_their_own_lengths_and_the_fullest_micro_batch_counts() -> None:
    all_rows = fullest_rows(composed(micro_batch=64), COMPLETIONS, PROMPTS)
    part = fullest_rows(composed(), COMPLETIONS, PROMPTS)
    assert all_rows is not None and part is not None
    assert abs(all_rows[0] - 100) < 5 and abs(all_rows[1] - 300) < 15
    assert sum(part) > 1.03 * sum(all_rows)


def test_padded_rows_have_the_longest_of_their_ranks_batch() -> None:
    padded = fullest_rows(composed(packs_rows=False), COMPLETIONS, PROMPTS)
    assert padded == (
        round(PROMPTS.expected_longest(64)),
        round(COMPLETIONS.up_to(1024).expected_longest(64)),
    )


def test_unknown_prompts_are_the_longest_and_completions_end_at_the_longest() -> None:
    rows = fullest_rows(composed(packs_rows=False, completion_length=400), COMPLETIONS, None)
    assert rows is not None and rows[0] == 512 and rows[1] <= 400


def test_a_token_budget_is_filled_at_any_lengths() -> None:
    assert fullest_rows(replace(composed(), token_budget=True), COMPLETIONS, PROMPTS) is None
