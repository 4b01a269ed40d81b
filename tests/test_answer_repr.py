"""repr of the API's answers: the verdict in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autotune
from autotune.api.answers import PredictAnswer, RunAnswer
from autotune.core.space import Candidate
from autotune.report.answer_document import document
from autotune.solver import SolveAnswer
from autotune.solver.largest_value import LargestValue, Tried
from tests.report.answers import answered
from tests.report.test_forecast import CANDIDATE, PREDICTION, WAY

LOG = Path(__file__).parent / "failures" / "samples" / "disk.txt"


def test_predict_says_whether_it_fits() -> None:
    job = answered(900).job
    for prediction, verdict in (
        (PREDICTION, "does not fit: 50 GiB (48 to 53) of 40 GiB; 10 GiB too much, at least 8 GiB"),
        (WAY.prediction, "fits: 30 GiB (29 to 31) of 40 GiB; 10 GiB left, at least 9 GiB;"),
    ):
        answer = PredictAnswer(
            job=job,
            candidate=CANDIDATE,
            prediction=prediction,
            ways=(),
            write_document=dict,
        )
        assert repr(answer).startswith(f"<PredictAnswer: {verdict}")
        assert "\n" not in repr(answer)


@pytest.mark.parametrize(
    ("limit_mib", "verdict"), [(900, "Measured: "), (100, "Nothing fits into 100 MiB.")]
)
def test_run_says_what_the_page_says_first(limit_mib: int, verdict: str) -> None:
    case = answered(limit_mib)
    answer = RunAnswer(
        job=case.job,
        recommendation=case.answer,
        forecast=None,
        document=json.loads(json.dumps(document(case.job, case.answer, []))),
    )
    assert repr(answer).startswith(f"<RunAnswer: {verdict}") and "\n" not in repr(answer)


def test_solve_names_the_value() -> None:
    fitting = Tried(
        value=4,
        job=answered(900).job,
        candidate=Candidate(
            knobs={},
            settings={},
            load={},
        ),
        prediction=WAY.prediction,
    )
    largest = LargestValue(
        setting="batch",
        requested=2,
        surely=fitting,
        possibly=None,
        next=None,
        tried=(fitting,),
    )
    answer = SolveAnswer(
        job=answered(900).job,
        largest=largest,
        document={},
    )
    assert repr(answer).startswith(
        "<SolveAnswer, predicted: batch=4 surely fits: 30 GiB (29 to 31)"
    )


def test_diagnose_names_the_failure() -> None:
    text = repr(autotune.diagnose(LOG))
    assert text.startswith("<Diagnosis: ") and "disk" in text and "\n" not in text
