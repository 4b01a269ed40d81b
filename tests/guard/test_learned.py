"""What the record learns from guarded runs, and what `predict`, `run` and `preflight` then say."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from autotune.api.predictions import predict_flags
from autotune.core.events import CandidatePredicted, Event, Note
from autotune.core.measurement import Outcome
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import GIB
from autotune.diagnosis import diagnose
from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import Ending, Reason
from autotune.guard.history import AttemptRecord, History
from autotune.guard.learned import learn
from autotune.guard.step_progress import MAX_LENGTHS, PrintedLengths
from autotune.guard.training import KnownTraining
from autotune.preflight.proofs import Proof, Proofs
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources
from autotune.request.sources import length_sources
from autotune.search.record import Record

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total"
    " capacity of 39.39 GiB of which 1.00 GiB is free."
)
LENGTH = 200
STEP_SECONDS = 3.0
COMPLETIONS_PER_STEP = 8 * 4
CONFIG = f"""
model_name_or_path: Qwen/Qwen2.5-0.5B
dtype: bfloat16
reward_funcs: [accuracy_reward]
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: {2 * LENGTH}
use_peft: true
output_dir: out
"""


@pytest.fixture(name="config")
def a_configuration(tmp_path: Path) -> Path:
    config = tmp_path / "train.yaml"
    config.write_text(CONFIG)
    return config


def flags(config: Path, **options: object) -> Flags:
    return Flags(config=str(config), gpus="A100-40G", max_prompt_length=64, **options)


def training_of(config: Path, **options: object) -> KnownTraining:
    request = read_sources(flags(config, **options), mode="predict").parse()
    candidate = candidate_of_job(request)
    return KnownTraining(
        request=request,
        original=candidate,
        candidate=candidate,
        config=config,
        command_words=("trl", "grpo", "--config", str(config)),
    )


def ended(output: str = OUT_OF_MEMORY, **end: int) -> Ending:
    diagnosis = diagnose(output)
    return Ending(
        reason=Reason.MEMORY,
        end=ProcessEnd(**(end or {"exit": 1})),
        cause=diagnosis.cause,
        evidence=diagnosis.evidence,
        diagnosis=diagnosis,
    )


def finished() -> Ending:
    return Ending(reason=Reason.FINISHED, end=ProcessEnd(exit=0))


def attempt(last_step: int = 800) -> AttemptRecord:
    record = AttemptRecord(
        number=1,
        config=None,
        command=[],
        began=0.0,
        from_step=None,
        checkpoint=None,
    )
    record.last_step = last_step
    record.step_seconds = STEP_SECONDS
    record.lengths = [{"mean": LENGTH, "longest": LENGTH, "clipped": 0.0}]
    return record


# 1. A configuration that ran out of memory.


def test_predict_says_first_that_it_ran_out_of_memory(config: Path) -> None:
    before = predict_flags(flags(config))
    assert before.prediction.fits and before.document["ran_out_of_memory"] is None
    learn(training_of(config), ended(), attempt(), "night/guard.json")
    events: list[Event] = []
    after = predict_flags(flags(config), listener=events.append)
    printed = [event for event in events if isinstance(event, Note | CandidatePredicted)]
    assert isinstance(printed[0], Note)
    for fact in ("after 800 steps", "200 tokens", "night/guard.json", "Tried to allocate 1.25 GiB"):
        assert fact in printed[0].text
    assert after.document["ran_out_of_memory"] == printed[0].text
    assert after.prediction.fits is None
    peak = before.prediction.peak_memory_bytes
    assert after.prediction.peak_memory_bytes == peak

    # 1.25 GiB were asked for, 1 GiB was free: another one needs 0.25 GiB less, and 3 % for longer
    # rows.
    assert after.ways
    for way in after.ways:
        assert way.prediction.peak_memory_bytes.value <= 0.97 * peak.value - 0.25 * GIB


def test_another_configuration_is_not_concerned(config: Path) -> None:
    learn(training_of(config), ended(), attempt(), "guard.json")
    config.write_text(CONFIG.replace("size: 8", "size: 4"))
    assert predict_flags(flags(config)).prediction.fits


def test_a_run_that_finished_since_has_shown_that_it_fits(config: Path) -> None:
    learn(training_of(config), ended(), attempt(), "guard.json")
    learn(training_of(config), finished(), attempt(900), "guard.json")
    assert predict_flags(flags(config)).prediction.fits


def test_more_memory_than_was_refused_is_not_refused(config: Path) -> None:
    limited = training_of(config, memory_limit="20GiB")
    assert limited.request.job.memory_limit_bytes == 20 * GIB
    learn(limited, ended(), attempt(), "guard.json")
    assert predict_flags(flags(config)).prediction.fits, "with all of the card"
    assert predict_flags(flags(config, memory_limit="18GiB")).prediction.fits is None


def test_it_is_not_proven_any_more(config: Path) -> None:
    training = training_of(config)
    learn(training, ended(), attempt(), "guard.json")
    request = training.request
    proof = Proofs(request.job, request.trainer, training.candidate, {}).find()
    assert isinstance(proof, Proof) and not proof.trial.verdict.fits
    assert "after 800 steps of a guarded run" in proof.trial.verdict.why
    fresh = replace(request.job, fresh=True)
    assert isinstance(Proofs(fresh, request.trainer, training.candidate, {}).find(), str)


def test_a_search_knows_it_as_measured(config: Path) -> None:
    training = training_of(config)
    learn(training, ended(), attempt(), "guard.json")
    (trial,) = Record(training.request.job, {}).earlier().trials
    assert trial.candidate.id == training.candidate.id
    assert trial.measurement.outcome.is_out_of_memory
    other_release = {"transformers": "4.0.0"}
    assert Record(training.request.job, other_release).earlier().trials == ()


def test_memory_of_other_processes_says_nothing_about_it(config: Path) -> None:
    learn(training_of(config), replace(ended(), cause="gpu_other_process"), attempt(), "guard.json")
    assert predict_flags(flags(config)).prediction.fits


def test_on_a_cpu_a_limit_of_the_shell_says_nothing_about_the_machine(config: Path) -> None:
    training = training_of(config)
    request = training.request
    task = request.job.task
    on_cpu = replace(task, hardware=replace(task.hardware, kind="cpu"))
    training = replace(training, request=replace(request, job=replace(request.job, task=on_cpu)))
    message = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    learn(training, ended(message), attempt(), "guard.json")
    assert Record(training.request.job, {}).earlier().trials == ()
    learn(training, ended(message, signal=signal.SIGKILL), attempt(), "guard.json")
    (trial,) = Record(training.request.job, {}).earlier().trials
    assert trial.measurement.outcome is not Outcome.OK


# 2. Its speed.


def test_the_speed_of_a_run_is_predicted_from_then_on(config: Path, tmp_path: Path) -> None:
    record = attempt()
    history = History(out=tmp_path, config=str(config), attempts=[record])
    history.write()
    before = predict_flags(flags(config, lengths=str(history.file))).prediction
    learn(training_of(config), finished(), record, "guard.json")
    after = predict_flags(flags(config, lengths=str(history.file))).prediction

    # 32 completions of 200 tokens in 3 s.
    measured = COMPLETIONS_PER_STEP * LENGTH / STEP_SECONDS
    assert record.tokens_per_second == pytest.approx(measured)
    before_run, after_run = _rate_of(before), _rate_of(after)
    assert after_run.value == pytest.approx(measured)
    assert _width(after_run) == pytest.approx(_width(before_run) / 2, rel=0.05)
    assert any("as in a guarded run on" in assumed for assumed in after.assumptions)


def _rate_of(prediction: Prediction) -> Estimate:
    assert prediction.tokens_per_second_at_lengths is not None
    return prediction.tokens_per_second_at_lengths


def _width(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.low)


def test_speeds_of_another_model_are_left_as_they_are(config: Path) -> None:
    larger = config.with_name("larger.yaml")
    larger.write_text(CONFIG.replace("0.5B", "1.5B"))
    before = predict_flags(flags(larger)).prediction
    learn(training_of(config), finished(), attempt(), "guard.json")
    assert predict_flags(flags(larger)).prediction == before


# 3. Its lengths.


def test_lengths_can_name_a_guarded_run(tmp_path: Path) -> None:
    record = attempt()
    record.lengths = [{"mean": 100.0}, {"mean": 300.0, "longest": 300.0}]
    history = History(out=tmp_path, config=None, attempts=[record])
    history.write()
    for source in (tmp_path, history.file):
        lengths = length_sources.read(str(source))
        assert lengths.mean == pytest.approx(200, rel=0.02), source
    assert json.loads(history.file.read_text())["attempts"][0]["lengths"] == record.lengths


def test_lengths_are_read_from_the_lines_of_a_run_however_they_arrive() -> None:
    text = "{'loss': 0.1, 'completions/mean_length': 120.0, 'completions/max_length': 250.0}\n"
    verl = "step:2 - response_length/mean:130.5 - response_length/max:260.0\n"
    printed = PrintedLengths()
    for place in range(0, len(text + verl), 7):
        printed.feed((text + verl)[place : place + 7])
    assert printed.steps == [
        {"mean": 120.0, "longest": 250.0},
        {"mean": 130.5, "longest": 260.0},
    ]


def test_lengths_of_a_long_run_are_spread_over_it() -> None:
    printed = PrintedLengths()
    for step in range(10_000):
        printed.feed(f"{{'completions/mean_length': {step + 1}.0}}\n")
    means = [step["mean"] for step in printed.steps]
    assert MAX_LENGTHS / 2 <= len(means) <= MAX_LENGTHS
    assert means[0] < 200 and means[-1] > 9_800
    gaps = {later - earlier for earlier, later in pairwise(means)}
    assert len(gaps) == 1, "evenly"
