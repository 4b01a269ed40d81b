"""What is not known: a verdict only where all ways agree, intervals that hold them all, and the fact that decides by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from autotune.asking.flags import Flags, ways_of
from autotune.candidate import Candidate, KnobValue
from autotune.errors import BadInput
from autotune.predict.unknown import Way, agreed, worst
from autotune.prediction import Estimate, Prediction
from autotune.units import GIB


def prediction(low: float, value: float, high: float, *, fits: bool | None, limit: int = 40 * GIB) -> Prediction:
    peak = Estimate(value=value * GIB, low=low * GIB, high=high * GIB)
    return Prediction(
        candidate_id="one", basis="traced", fits=fits, limit_bytes=limit, peak_memory_bytes=peak, torch_peak_allocated_bytes=peak,
        torch_peak_reserved_bytes=peak, depends_on=() if fits is not None else ("the context",),
    )  # fmt: skip


def way(facts: Mapping[str, KnobValue], found: Prediction) -> Way:
    return Way(facts=facts, candidate=Candidate(knobs=facts, settings=facts, load={}), prediction=found)


SMALL, LARGE = prediction(9, 10, 11, fits=True), prediction(49, 50, 52, fits=False)


def test_one_way_is_what_it_is() -> None:
    assert agreed([way({}, SMALL)]) is SMALL


def test_the_interval_holds_every_way_and_the_figure_is_the_worst() -> None:
    found = agreed([way({"batch": 1}, SMALL), way({"batch": 8}, LARGE)])
    assert found.peak_memory_bytes == Estimate(value=50 * GIB, low=9 * GIB, high=52 * GIB)
    assert worst([way({"batch": 1}, SMALL), way({"batch": 8}, LARGE)]).facts == {"batch": 8}


def test_where_ways_differ_the_fact_that_decides_is_named() -> None:
    ways = [way({"batch": batch, "seed": seed}, SMALL if batch == 1 else LARGE) for batch in (1, 8) for seed in (1, 2)]
    found = agreed(ways)
    assert found.fits is None
    assert found.depends_on == ("batch, which is not given: fits with 1, does not fit with 8",)


def test_where_all_agree_there_is_a_verdict_and_nothing_to_depend_on() -> None:
    larger = dataclasses.replace(LARGE, peak_memory_bytes=Estimate.exactly(60 * GIB))
    found = agreed([way({"batch": 4}, LARGE), way({"batch": 8}, larger)])
    assert found.fits is False and found.depends_on == ()


def test_a_way_that_is_undecided_itself_says_what_it_hangs_on() -> None:
    found = agreed([way({"batch": 1}, SMALL), way({"batch": 2}, prediction(38, 40, 42, fits=None))])
    assert found.depends_on == ("batch, which is not given: fits with 1, may or may not fit with 2", "the context")


def test_every_combination_is_a_way() -> None:
    ways = ways_of(Flags(unknown=("a=1,2", "b=true,null"), set=("c=3",)))
    assert [facts for facts, _ in ways] == [
        {"a": 1, "b": True}, {"a": 1, "b": None}, {"a": 2, "b": True}, {"a": 2, "b": None}
    ]  # fmt: skip
    assert ways[1][1].set == ("c=3", "a=1", "b=null") and ways[1][1].unknown == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (Flags(unknown=("a=1,2",), set=("a=1",)), "both given and unknown"),
        (Flags(unknown=("a=,",)), "--unknown a was given no value"),
        (Flags(unknown=("a=1,2,3,4,5", "b=1,2,3,4")), "20 ways"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: Flags, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        ways_of(flags)
