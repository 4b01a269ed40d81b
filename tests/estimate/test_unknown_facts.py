"""Unknown facts: verdicts that all variants share, intervals over all of them, and the deciding facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from autotune.core.errors import BadInput
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate, KnobValue
from autotune.core.units import GIB
from autotune.estimate.unknown_facts import FactVariant, agreed, worst
from autotune.request.assignments import ways_of
from autotune.request.flags import Flags


def prediction(low: float, value: float, high: float, *, fits: bool | None, limit: int = 40 * GIB) -> Prediction:
    peak = Estimate(value=value * GIB, low=low * GIB, high=high * GIB)
    return Prediction(
        candidate_id="one", basis="traced", fits=fits, limit_bytes=limit, peak_memory_bytes=peak, torch_peak_allocated_bytes=peak,
        torch_peak_reserved_bytes=peak, depends_on=() if fits is not None else ("the context",),
    )  # fmt: skip


def variant(facts: Mapping[str, KnobValue], found: Prediction) -> FactVariant:
    return FactVariant(facts=facts, candidate=Candidate(knobs=facts, settings=facts, load={}), prediction=found)


SMALL, LARGE = prediction(9, 10, 11, fits=True), prediction(49, 50, 52, fits=False)


def test_one_variant_is_unchanged() -> None:
    assert agreed([variant({}, SMALL)]) is SMALL


def test_the_interval_covers_all_variants_and_the_value_is_the_worst() -> None:
    found = agreed([variant({"batch": 1}, SMALL), variant({"batch": 8}, LARGE)])
    assert found.peak_memory_bytes == Estimate(value=50 * GIB, low=9 * GIB, high=52 * GIB)
    assert worst([variant({"batch": 1}, SMALL), variant({"batch": 8}, LARGE)]).facts == {"batch": 8}


def test_the_deciding_fact_is_named() -> None:
    variants = [variant({"batch": batch, "seed": seed}, SMALL if batch == 1 else LARGE) for batch in (1, 8) for seed in (1, 2)]
    found = agreed(variants)
    assert found.fits is None
    assert found.depends_on == ("batch, which is not given: fits with 1, does not fit with 8",)


def test_agreement_gives_a_verdict_without_causes() -> None:
    larger = dataclasses.replace(LARGE, peak_memory_bytes=Estimate.exactly(60 * GIB))
    found = agreed([variant({"batch": 4}, LARGE), variant({"batch": 8}, larger)])
    assert found.fits is False and found.depends_on == ()


def test_an_undecided_variant_adds_its_own_causes() -> None:
    found = agreed([variant({"batch": 1}, SMALL), variant({"batch": 2}, prediction(38, 40, 42, fits=None))])
    assert found.depends_on == ("batch, which is not given: fits with 1, may or may not fit with 2", "the context")


def test_every_combination_is_a_variant() -> None:
    variants = ways_of(Flags(unknown=("a=1,2", "b=true,null"), set=("c=3",)))
    assert [facts for facts, _ in variants] == [
        {"a": 1, "b": True}, {"a": 1, "b": None}, {"a": 2, "b": True}, {"a": 2, "b": None}
    ]  # fmt: skip
    assert variants[1][1].set == ("c=3", "a=1", "b=null") and variants[1][1].unknown == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags(unknown=("a=1,2",), set=("a=1",)), "both given and unknown"),
        (Flags(unknown=("a=,",)), "--unknown a was given no value"),
        (Flags(unknown=("a=1,2,3,4,5", "b=1,2,3,4")), "20 ways"),
    ],
)
def test_invalid_unknown_facts_are_refused(flags: Flags, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        ways_of(flags)
