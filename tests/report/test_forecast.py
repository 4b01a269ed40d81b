"""Predictions as text, bars and JSON: sums agree, lines fit the terminal, and all are marked as
predicted.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from autotune.core.answer import Change, Forecast, PredictedCandidate, WayToFit
from autotune.core.job import Job
from autotune.core.prediction import EngineFit, Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.core.units import GIB
from autotune.report.answer_document import document as answer_document
from autotune.report.answer_document import prediction_document
from autotune.report.document_rows import prediction_row
from autotune.report.forecast_text import show_forecast
from autotune.report.prediction_text import (
    show_basis,
    show_evidence,
    show_verdict,
    show_ways,
    uncounted_savings,
)
from autotune.search import forecast_search
from tests.simulated import toy_job, toy_space

CANDIDATE = Candidate(
    knobs={"batch": 8, "checkpointing": True},
    settings={"batch": 8},
    load={},
)


def gib(
    value: float,
    low: float | None = None,
    high: float | None = None,
) -> Estimate:
    low, high = value if low is None else low, value if high is None else high
    return Estimate(
        value=value * GIB,
        low=low * GIB,
        high=high * GIB,
    )


PREDICTION = Prediction(
    candidate_id=CANDIDATE.id,
    basis="traced",
    fits=False,
    limit_bytes=40 * GIB,
    peak_memory_bytes=gib(50, 48, 53),
    torch_peak_allocated_bytes=gib(47),
    torch_peak_reserved_bytes=gib(49, 47, 51),
    phases=(
        PhasePrediction(
            name="forward",
            peak_bytes=gib(30, 29, 31),
            seconds=Estimate(
                value=1.0,
                low=0.5,
                high=2.0,
            ),
        ),
        PhasePrediction(
            name="backward",
            peak_bytes=gib(50, 48, 53),
            seconds=Estimate(
                value=3.0,
                low=1.5,
                high=6.0,
            ),
        ),
    ),
    breakdown={"weights": 15 * GIB, "activations": 30 * GIB, "context": 5 * GIB},
    tokens_per_second=Estimate(
        value=1000.0,
        low=500.0,
        high=2000.0,
    ),
    assumptions=("prompts are as long as allowed",),
    versions={"trl": "1.16.0", "torch": "2.13.0"},
)
WAY = WayToFit(
    change={"batch": 4},
    learning=False,
    prediction=replace(PREDICTION, fits=True, peak_memory_bytes=gib(30, 29, 31)),
    speed_ratio=0.83,
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return toy_job(tmp_path, toy_space(), 40 * GIB, mode="predict")


def shown(
    job: Job,
    prediction: Prediction,
    width: int = 100,
    ways: tuple[WayToFit, ...] = (),
) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
    )
    show_verdict(console, prediction)
    if not prediction.fits:
        show_ways(console, ways)
    show_evidence(console, prediction)
    show_basis(console, job, CANDIDATE, prediction, assumed=("global batch 64",))
    return stream.getvalue()


def test_the_answer_its_size_and_its_reason(job: Job) -> None:
    text = shown(job, PREDICTION, ways=(WAY,))
    assert "predicted, nothing was measured" in text and "trl 1.16.0" in text
    assert text.startswith(
        "does not fit: 50 GiB (48 to 53) of 40 GiB; 10 GiB too much, at least 8 GiB\n"
    )
    assert "at the peak (backward)" in text
    assert (
        "--set batch=4" in text
        and "0.83 times the speed" in text
        and "10 GiB left, at least 9 GiB" in text
    )
    assert "global batch 64" in text and "prompts are as long as allowed" in text
    assert "1,000 tokens/s (500 to 2,000)" in text and "backward 75%" in text


def test_the_speed_at_the_lengths_given_stands_beside_that_at_the_longest(job: Job) -> None:
    rollout = PhasePrediction(
        name="rollout",
        peak_bytes=gib(20, 19, 21),
        seconds=Estimate.exactly(1.0),
    )
    prediction = replace(
        PREDICTION,
        phases=(rollout, *PREDICTION.phases),
        tokens_per_second_at_lengths=Estimate(
            value=300.0,
            low=200.0,
            high=400.0,
        ),
        seconds_at_lengths={"rollout": Estimate.exactly(1.0), "backward": Estimate.exactly(4.0)},
    )
    text = shown(job, prediction)
    assert "1,000 tokens/s (500 to 2,000) at the longest completions" in text
    assert "300 tokens/s (200 to 400) at the lengths given; rollout 20%, backward 80%" in text
    assert "at the lengths given" not in shown(job, PREDICTION)
    assert "1,000 tokens/s (500 to 2,000) at the longest rows" in shown(job, PREDICTION)
    row = prediction_row(prediction)
    assert (
        row["tokens_per_second"]["value"] == 1000
        and row["tokens_per_second_at_lengths"]["value"] == 300
    )


def test_both_peaks_are_shown_where_lengths_are_given(job: Job) -> None:
    prediction = replace(
        PREDICTION, peak_memory_bytes_at_lengths=gib(20, 19, 22), fits_at_lengths=True
    )
    text = shown(job, prediction)
    assert "does not fit: 50 GiB" in text
    assert "At the lengths given: fits, 20 GiB (19 to 22)." in text
    row = prediction_row(prediction)
    assert (
        row["peak_memory_bytes_at_lengths"]["value"] == 20 * GIB and row["fits_at_lengths"] is True
    )


def test_candidates_are_ranked_by_the_speed_at_the_lengths_given() -> None:
    quick_at_the_longest = PredictedCandidate(candidate=CANDIDATE, prediction=PREDICTION)
    quick_as_it_will_be = PredictedCandidate(
        candidate=CANDIDATE,
        prediction=replace(
            PREDICTION,
            tokens_per_second=Estimate.exactly(900.0),
            tokens_per_second_at_lengths=Estimate.exactly(1100.0),
        ),
    )
    assert forecast_search.speed(quick_as_it_will_be) > forecast_search.speed(quick_at_the_longest)


def test_bars_share_one_scale_with_the_limit(job: Job) -> None:
    lines = [line for line in shown(job, PREDICTION).splitlines() if "│" in line]
    assert len(lines) == 5
    assert len({line.index("│") for line in lines}) == 1, "the limit is in one column"
    full = {line.split()[0]: line.count("█") for line in lines}
    assert full["backward"] > full["forward"] > full["weights"] > full["context"] > 0
    # What is above the limit is drawn beyond its mark.
    backward = next(line for line in lines if "backward" in line)
    assert "█" in backward[backward.index("│") :] and "░" in backward


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_pictures_fit_the_terminal(job: Job, width: int) -> None:
    pictures = [line for line in shown(job, PREDICTION, width).splitlines() if "│" in line]
    assert pictures and all(len(line) <= width for line in pictures)


def test_what_fits_and_what_depends(job: Job) -> None:
    assert "fits: 30 GiB (29 to 31) of 40 GiB; 10 GiB left, at least 9 GiB" in shown(
        job, WAY.prediction
    )
    undecided = replace(
        PREDICTION,
        fits=None,
        peak_memory_bytes=gib(40, 38, 42),
        depends_on=("what the driver takes",),
    )
    text = shown(job, undecided)
    assert "can't be decided" in text and "depends on what the driver takes" in text
    refused = replace(PREDICTION, failure="ValueError: No available memory for the cache blocks")
    assert "it would stop with: ValueError: No available memory" in shown(job, refused)
    assert "No change makes it surely fit" in text


def test_a_saving_that_is_not_counted_may_make_it_fit() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    sentences = (
        "offload_policy=false, because the value is not modelled: it needs less memory",
        "8 GPUs for training",
    )
    show_ways(console, (), uncounted=uncounted_savings(sentences))
    text = stream.getvalue()
    assert "No change makes it surely fit" not in text
    assert "offload_policy of the file may" in text


def test_an_engine_and_an_unknown_speed(job: Job) -> None:
    engine = EngineFit(
        kv_cache_bytes=gib(3, 2, 4),
        kv_cache_tokens=54_321,
        concurrency=12.34,
        longest_length=8192,
    )
    text = shown(job, replace(PREDICTION, engine=engine, tokens_per_second=None))
    assert "54,321 tokens, 12.3 sequences" in text
    assert "unknown for this hardware" in text


def test_the_document_keeps_the_contract(job: Job) -> None:
    document = prediction_document(job, CANDIDATE, PREDICTION, (WAY,))
    assert document["schema"] == 1 and document["basis"] == "traced" and document["fits"] is False
    assert document["peak_memory_bytes"] == {"value": 50 * GIB, "low": 48 * GIB, "high": 53 * GIB}
    assert document["margin_bytes"] == {"value": -10 * GIB, "low": -13 * GIB, "high": -8 * GIB}
    assert (
        sum(part["bytes"] for part in document["breakdown"])
        == document["peak_memory_bytes"]["value"]
    )
    assert [phase["name"] for phase in document["phases"]] == ["forward", "backward"]
    assert document["host_memory_bytes"] is None
    assert document["ways_to_fit"][0]["change"] == {"batch": 4}


def _forecast(**changes: object) -> Forecast:
    winner = PredictedCandidate(candidate=CANDIDATE, prediction=WAY.prediction)
    settled: dict[str, object] = {
        "winner": winner,
        "baseline": PredictedCandidate(candidate=CANDIDATE, prediction=PREDICTION),
        "changes": (
            Change(
                name="batch",
                baseline=8,
                recommended=4,
                effect="neutral",
                why="sequences at once",
            ),
        ),
        "candidates": 10,
        "predicted": 10,
        "screened": 4,
        "elapsed_seconds": 1.5,
    }
    return Forecast(**{**settled, **changes})  # type: ignore[arg-type]


def test_a_predicted_recommendation_is_marked_everywhere(job: Job) -> None:
    document = answer_document(
        job, _forecast(), ["out/recommended.yaml"], confirm_with="autotune run --mode probe"
    )
    assert document["status"] == "ok" and document["basis"] == "predicted"
    assert document["recommendation"]["basis"] == document["baseline"]["basis"] == "predicted"
    assert document["recommendation"]["certificate"] is None
    assert document["recommendation"]["peak_memory_bytes"] == 30 * GIB
    assert document["baseline"]["outcome"] is None
    assert document["counts"] == {
        "candidates": 10,
        "predicted": 10,
        "screened": 4,
        "implied": 0,
        "probed": 0,
        "out_of_memory": 0,
        "failed": 0,
        "loads": 0,
    }
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=120,
        highlight=False,
        markup=False,
    )
    show_forecast(console, _forecast(), document, confirm_with="autotune run --mode probe")
    text = stream.getvalue()
    assert text.startswith("Predicted, nothing was measured.")
    assert "To confirm it, where the hardware is: autotune run --mode probe" in text
    assert "None was run." in text


def test_an_end_by_the_budget_is_reported(job: Job) -> None:
    ended = _forecast(candidates=15_360, predicted=10)
    document = answer_document(job, ended, [], confirm_with="x")
    assert document["stopped_by"] == "budget" and document["counts"]["predicted"] == 10
    assert answer_document(job, _forecast(), [], confirm_with="x")["stopped_by"] is None
    stream = io.StringIO()
    show_forecast(Console(file=stream, width=200), ended, document, confirm_with="x")
    assert "--budget ended it: 10 of 15,360 candidates" in stream.getvalue()
    without = _forecast(
        winner=None,
        candidates=20,
        predicted=10,
        screened=10,
        nearest_miss=ended.winner,
    )
    assert answer_document(job, without, [], confirm_with="x")["status"] == "undecided", (
        "nobody looked at the others"
    )


def test_nothing_fits_and_undecided_are_distinguished(job: Job) -> None:
    miss = PredictedCandidate(candidate=CANDIDATE, prediction=PREDICTION)
    nothing = answer_document(
        job,
        _forecast(
            winner=None,
            screened=10,
            nearest_miss=miss,
        ),
        [],
        confirm_with="x",
    )
    assert nothing["status"] == "nothing_fits" and nothing["recommendation"] is None
    assert nothing["nearest_miss"]["knobs"] == {"batch": 8, "checkpointing": True}
    undecided = answer_document(job, _forecast(winner=None, undecided=miss), [], confirm_with="x")
    assert undecided["status"] == "undecided"
