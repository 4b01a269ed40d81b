from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from autotune.core.measurement import Failure, Outcome, judge
from autotune.report import document_types
from autotune.report.answer_document import document
from autotune.report.answer_facts import nearest_miss
from autotune.report.terminal import show_answer
from tests.report.answers import answered
from tests.simulated import MIB

CONTRACT = {
    "schema",
    "status",
    "basis",
    "recommendation",
    "baseline",
    "trade_offs",
    "counts",
    "proven",
    "study",
    "out",
    "elapsed_seconds",
    "gpu_seconds",
}
RECOMMENDED = {
    "knobs",
    "changed_learning_knobs",
    "tokens_per_second",
    "peak_memory_bytes",
    "limit_bytes",
    "certificate",
    "files",
}
COUNTS = {"candidates", "screened", "implied", "probed", "out_of_memory", "failed", "loads"}


def test_the_document_keeps_the_contract() -> None:
    case = answered(900)
    written = json.loads(json.dumps(document(case.job, case.answer, ["out/a.yaml"])))
    assert set(written) >= CONTRACT
    assert set(written["recommendation"]) >= RECOMMENDED
    assert set(written["counts"]) >= COUNTS
    assert set(written["baseline"]) >= {
        "knobs",
        "outcome",
        "tokens_per_second",
        "peak_memory_bytes",
    }
    assert set(written["recommendation"]["tokens_per_second"]) == {"worst", "typical"}
    assert (written["schema"], written["status"], written["basis"]) == (1, "ok", "measured")
    assert written["recommendation"]["files"] == ["out/a.yaml"]
    assert written["study"] == {"storage": case.job.storage, "name": "toy"}


def test_figures_are_the_measured_ones_and_unknown_is_null() -> None:
    case = answered(900)
    row = document(case.job, case.answer, [])
    best = row["recommendation"]
    assert case.answer.winner is not None
    assert (
        best["peak_memory_bytes"]
        == case.machine.need(case.answer.winner.candidate)
        <= best["limit_bytes"]
        == 900 * MIB
    )
    assert best["tokens_per_second"] == {
        "worst": float(round(case.machine.speed(case.answer.winner.candidate))),
        "typical": None,
    }
    assert best["certificate"]["torch_reserved_bytes"] is None
    assert row["gpu_seconds"] is None, "there is no GPU here"


def test_a_password_in_the_storage_is_not_written_down() -> None:
    from dataclasses import replace

    case = answered(900)
    job = replace(case.job, storage="postgresql+psycopg://me:secret@host/db")
    text = json.dumps(document(job, case.answer, []))
    assert "secret" not in text and "host/db" in text


def test_a_baseline_that_ran_out_of_memory_has_no_speed() -> None:
    case = answered(450)
    baseline = document(case.job, case.answer, [])["baseline"]
    assert baseline["outcome"] == "oom_backward" and baseline["tokens_per_second"] is None


def test_nothing_fits() -> None:
    case = answered(100)
    answer_document = document(case.job, case.answer, [])
    assert answer_document["status"] == "nothing_fits" and answer_document["recommendation"] is None
    assert answer_document["nearest_miss"]["phase"] == "backward"
    assert answer_document["counts"]["out_of_memory"] == len(case.answer.trials)


def test_there_is_a_nearest_miss_only_where_nothing_fits() -> None:
    assert nearest_miss(answered(100).answer) is not None
    assert nearest_miss(answered(450).answer) is None


def test_failures_without_memory_errors_do_not_mean_nothing_fits() -> None:
    case = answered(900, everything_crashes=True)
    assert case.answer.winner is None
    answer_document = document(case.job, case.answer, [])
    assert answer_document["status"] == "failed" and answer_document["nearest_miss"] is None


def test_a_budget_that_ended_every_probe_does_not_mean_nothing_fits() -> None:
    case = answered(900)
    ended = [
        replace(trial, measurement=replace(trial.measurement, outcome=Outcome.INTERRUPTED))
        for trial in case.answer.trials
    ]
    answer_document = document(case.job, replace(case.answer, winner=None, trials=tuple(ended)), [])
    assert answer_document["status"] == "undecided" and answer_document["recommendation"] is None


def test_the_checked_in_schema_is_that_of_the_types() -> None:
    """After a change of the types: `autotune.report.document_types.write_json_schema()`."""
    assert (
        Path(document_types.__file__).with_name(document_types.SCHEMA_FILE).read_bytes()
        == document_types.json_schema()
    )


@pytest.mark.parametrize("limit_mib", [1, 900], ids=["nothing fits", "one fits"])
def test_a_document_agrees_with_the_schema_and_has_no_field_beyond_it(limit_mib: int) -> None:
    case = answered(limit_mib)
    schema = json.loads(document_types.json_schema())
    answer_document = document(case.job, case.answer, ["out/recommended.yaml"])
    jsonschema.validate(json.loads(json.dumps(answer_document)), schema)
    assert answer_document.keys() <= schema["$defs"]["AnswerDocument"]["properties"].keys()
    assert all(
        row.keys() <= schema["$defs"]["CandidateRow"]["properties"].keys()
        for row in answer_document["trials"]
    )


def test_committed_examples_agree_with_the_schema() -> None:
    files = sorted((Path(__file__).parents[2] / "examples").glob("*/recommendation.json"))
    assert files
    for file in files:
        jsonschema.validate(json.loads(file.read_text()), json.loads(document_types.json_schema()))


def test_a_confirmation_that_crashed_does_not_mean_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = answered(900)
    assert case.answer.winner is not None
    crashed = replace(
        case.answer.winner.measurement, outcome=Outcome.CRASH, failure=Failure(evidence="no file")
    )
    confirmed = replace(
        case.answer.winner,
        purpose="confirm",
        measurement=crashed,
        verdict=judge(crashed),
    )
    fitting = tuple(
        trial for trial in case.answer.trials if trial.verdict.fits and trial.purpose != "confirm"
    )
    assert fitting
    answer = replace(case.answer, winner=None, trials=(*fitting, confirmed))
    assert document(case.job, answer, [])["status"] == "failed"
    show_answer(Console(width=200), case.job, answer, [])
    output = capsys.readouterr().out
    assert (
        "What fitted failed in the longer run that confirms it" in output
        and "fits into" not in output
    )
    failed = replace(confirmed, purpose="search")
    show_answer(Console(width=200), case.job, replace(answer, trials=(*fitting, failed)), [])
    assert "What fitted was not confirmed by a longer run" in capsys.readouterr().out
