"""Rows that occurred are evidence for the next configuration: the run needed more than predicted at
those rows, and so will the next one.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.api.predictions import predict_flags
from autotune.core.prediction import Prediction
from autotune.core.units import GIB
from autotune.diagnosis import diagnose
from autotune.estimate.screening import Point
from autotune.guard.history import AttemptRecord
from autotune.guard.learned import learn, shown_step_rows
from autotune.guard.smaller import Choice, Evidence
from autotune.guard.training import KnownTraining
from autotune.prediction.service import open_prediction_service
from autotune.prediction.step_rows import StepRows
from autotune.search.shown_room import Shown, shown_rooms
from tests.guard.test_learned import OUT_OF_MEMORY, attempt, ended, flags, training_of

MICRO_BATCH = 32
GLOBAL_BATCH = 128  # of at least four micro-batches, whose steps the package's models know
PROMPT, LONGEST, OCCURRED = 64, 2048, 512
MISSING = 0.25 * GIB  # by OUT_OF_MEMORY: 1.25 GiB requested, 1 GiB free
CONFIG = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dtype: bfloat16
reward_funcs: [accuracy_reward]
per_device_train_batch_size: {micro}
gradient_accumulation_steps: {steps}
num_generations: 8
max_completion_length: {completion}
use_peft: true
output_dir: out
"""


def _config(
    folder: Path,
    completion: int = LONGEST,
    micro: int = MICRO_BATCH,
) -> Path:
    config = folder / f"of-{micro}-{completion}.yaml"
    config.write_text(
        CONFIG.format(
            completion=completion,
            micro=micro,
            steps=GLOBAL_BATCH // micro,
        )
    )
    return config


def _predicted(config: Path) -> Prediction:
    """Return what `autotune predict` computes for a file."""
    return predict_flags(flags(config)).prediction


def _next(training: KnownTraining, rows: StepRows | None) -> Choice:
    evidence = Evidence(
        diagnosis=diagnose(OUT_OF_MEMORY),
        peak_bytes=None,
        refuted=frozenset({training.key}),
        may_change=frozenset(),
        rows=rows,
    )
    following = training.smaller(evidence)
    assert following is not None
    return following[1]


def _attempt_that_ran_out(
    prompt: int,
    completion: int,
    phase: str = "backward",
) -> AttemptRecord:
    record = attempt()
    rows = {"rows": MICRO_BATCH, "tokens": prompt + completion, "completion_tokens": completion}
    record.ran_out = {"phase": phase, "rows": rows}
    return record


def test_the_room_is_that_of_the_rows_that_were_refused(tmp_path: Path) -> None:
    training = training_of(_config(tmp_path))
    shown = shown_step_rows(_attempt_that_ran_out(PROMPT, OCCURRED))
    choice = _next(training, shown)

    # The prediction of a file whose longest completions are those that occurred.
    refused = _predicted(_config(tmp_path, OCCURRED)).peak_memory_bytes.value
    assert choice.room_bytes == pytest.approx(0.97 * refused - MISSING, abs=MISSING / 100)
    assert choice.needed_bytes is not None and choice.needed_bytes <= choice.room_bytes

    # Without these rows the longest are taken for refused, which leaves more room.
    longest = _predicted(_config(tmp_path)).peak_memory_bytes.value
    room = _next(training, None).room_bytes
    assert room == pytest.approx(0.97 * longest - MISSING, abs=MISSING / 100)
    assert room > choice.room_bytes


@pytest.mark.parametrize("is_exact", [True, False])
def test_then_the_rows_that_were_refused_have_to_fit(tmp_path: Path, is_exact: bool) -> None:
    training = training_of(_config(tmp_path))
    request, candidate = training.request, training.candidate
    rows = StepRows(completion=OCCURRED)
    if is_exact:
        rows = StepRows(
            count=MICRO_BATCH,
            tokens=PROMPT + OCCURRED,
            completion=OCCURRED,
        )
    shown = Shown(missing_bytes=round(MISSING), rows=rows)
    smaller = training_of(_config(tmp_path, LONGEST, 8)).candidate
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        rooms = list(shown_rooms(request, candidate, service, shown))
        at_the_longest = rooms[0].service.predict(smaller).peak_memory_bytes
        at_those = rooms[1].service.predict(smaller).peak_memory_bytes
    assert at_the_longest == _predicted(_config(tmp_path, LONGEST, 8)).peak_memory_bytes
    assert at_those == _predicted(_config(tmp_path, OCCURRED, 8)).peak_memory_bytes
    refused = _predicted(_config(tmp_path, OCCURRED)).peak_memory_bytes.value
    longest = _predicted(_config(tmp_path)).peak_memory_bytes.value
    expected = [0.97 * peak - MISSING for peak in (refused, refused, longest)]
    if is_exact:  # then the longest were not refused
        del expected[2]
    assert [room.bytes for room in rooms] == pytest.approx(expected, abs=MISSING / 100)


def test_a_longer_prompt_than_the_data_have_is_believed(tmp_path: Path) -> None:
    training = training_of(_config(tmp_path))
    assert training.with_longest_rows(None).candidate.settings["max_prompt_length"] == PROMPT
    assert training.with_longest_rows(PROMPT - 1).key == training.key
    longer = training.with_longest_rows(900)
    assert longer.candidate.settings["max_prompt_length"] == 900
    assert longer.original == longer.candidate, "the prompts of the data are no change"
    assert training.with_rows_of(longer).key == longer.key != training.key


def test_rows_of_the_log_replace_unknown_ones() -> None:
    record = attempt()
    record.lengths = [{"mean": 90, "longest": 300}, {"mean": 80, "longest": 200}]
    assert shown_step_rows(record) == StepRows(completion=300)
    record.longest_completion = 350
    assert shown_step_rows(record) == StepRows(completion=350)
    record.ran_out = {"phase": "rollout", "rows": None}
    assert shown_step_rows(record) == StepRows(completion=350)
    refused = _attempt_that_ran_out(100, 400)
    assert shown_step_rows(refused) == StepRows(
        count=MICRO_BATCH,
        tokens=500,
        completion=400,
    )
    refused = _attempt_that_ran_out(100, 400, phase="evaluation")
    refused.lengths = []
    assert shown_step_rows(refused) is None, "an evaluation is no training step"


def test_rows_at_a_point() -> None:
    point = Point(
        micro_batch=8,
        prompt=100,
        completion=1000,
        micro_steps=4,
    )
    refused = StepRows(
        count=3,
        tokens=500,
        completion=300,
    )
    assert refused.at(point) == Point(3, 200, 300, 4)
    assert refused.of_one_length().at(point) == Point(8, 200, 300, 4)
    assert StepRows(completion=250).at(point) == Point(8, 100, 250, 4)
    assert StepRows(
        count=16,
        tokens=9000,
        completion=8000,
    ).at(point) == Point(8, 1000, 1000, 4)
    # Rows without a completion keep the shares: 110 of 1,100 tokens.
    assert StepRows(count=2, tokens=110).at(point) == Point(2, 10, 100, 4)


def test_predict_names_the_changes_that_fit_after_that_run(tmp_path: Path) -> None:
    config = _config(tmp_path)
    record = _attempt_that_ran_out(PROMPT, OCCURRED)
    ending = ended()
    assert ending.diagnosis is not None
    ending = replace(ending, diagnosis=replace(ending.diagnosis, phase="backward"))
    refused = _predicted(_config(tmp_path, OCCURRED)).peak_memory_bytes.value
    learn(training_of(config), ending, record, "guard.json")
    answer = predict_flags(flags(config))
    assert answer.ways
    for way in answer.ways:
        room = 0.97 * refused - MISSING + MISSING / 100
        assert way.prediction.peak_memory_bytes.value <= room
