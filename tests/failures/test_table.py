"""Failure table: recorded texts for each row, whose first line contains their source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune.core.measurement import Outcome, Phase
from autotune.failures.classify import _finding, _first_match, classify_exception, classify_exit
from autotune.failures.findings import Finding, ProcessExit, ReportedException
from autotune.failures.table import CAUSES, FAILURE_ROWS
from autotune.failures.tracebacks import exceptions_in
from tests.every import for_each

SAMPLES = Path(__file__).parent / "samples"
NAMES = sorted(file.stem for file in SAMPLES.iterdir())
"""`row`, and `row.variant` where a program words the same failure in several ways."""

ROW = {row.name: row for row in FAILURE_ROWS}

ORIGINS = (
    r"recorded: .*\d.*",  # printed for us, by a program of that version
    # printed for somebody else, who showed it there
    r"reported: https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+",
    r"source: .*https://github\.com/\S+.*",  # as it stands in a program that could not be run here
)


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text().partition("\n")[2].strip()


def raised(name: str, phase: Phase | None = "backward", **fields: object) -> ReportedException:
    kind, _, text = sample(name).partition(": ")
    return ReportedException(
        chain=((kind, text),),
        phase=phase,
        device="cuda",
        **fields,
    )  # type: ignore[arg-type]


def read_log(text: str) -> Finding | None:
    """Return the first known failure in the log of a run on GPUs, None where there is none."""
    for thrown in exceptions_in(text):
        match = _first_match([thrown.text], frames=thrown.frames)
        if match is not None:
            return _finding(
                match,
                ReportedException(
                    chain=(),
                    frames=thrown.frames,
                    device="cuda",
                ),
            )
    match = _first_match([text])
    return None if match is None else _finding(match, ReportedException(chain=(), device="cuda"))


def test_each_row_has_a_sample_and_each_sample_a_row() -> None:
    assert set(ROW) == {name.partition(".")[0] for name in NAMES}
    assert set(ROW) <= set(NAMES)
    assert len(ROW) == len(FAILURE_ROWS)


@for_each(NAMES)
def test_each_sample_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    first, _, text = (SAMPLES / f"{name}.txt").read_text().partition("\n")
    assert any(re.fullmatch(f"# {origin}", first) for origin in ORIGINS), (
        f"first line: '# reported: URL', not {first!r}"
    )
    assert text.strip()


@for_each(NAMES)
def test_each_sample_is_decided_by_its_own_row(name: str) -> None:
    row = ROW[name.partition(".")[0]]
    finding = read_log(sample(name))
    assert finding is not None
    assert finding.row == row.name
    assert finding.cause is None or finding.cause in CAUSES
    assert finding.evidence
    assert "\n" not in finding.evidence
    expected = {
        "memory": finding.outcome.is_out_of_memory,
        "host_memory": finding.outcome is Outcome.OOM_HOST,
    }
    expected |= {
        "illegal": finding.outcome is Outcome.ILLEGAL,
        "other": finding.outcome is Outcome.CRASH,
        "transient": finding.transient,
    }
    assert expected[row.kind]


def test_a_clean_log_is_no_failure() -> None:
    assert (
        read_log(
            "{'loss': 0.1, 'error_if_nonfinite': False}\nTraining done, peak memory 3.2 GiB, out of"
            " 4 GiB\n"
        )
        is None
    )


def test_the_phase_is_where_it_happened_unless_the_text_can_only_come_from_one() -> None:
    assert classify_exception(raised("cuda_out_of_memory")).outcome is Outcome.OOM_BACKWARD
    assert classify_exception(raised("vllm_no_cache_blocks")).outcome is Outcome.OOM_LOAD


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (
            "/site-packages/vllm/v1/worker/gpu_model_runner.py:_allocate_kv_cache_tensors",
            "kv_cache",
        ),
        ("/site-packages/trl/trainer/grpo_trainer.py:_move_model_to_vllm", "weight_sync"),
        ("/site-packages/transformers/loss/loss_utils.py:fixed_cross_entropy", "logits"),
        ("/site-packages/torch/optim/adamw.py:_init_group", "optimizer"),
        ("/site-packages/transformers/models/qwen2/modeling_qwen2.py:forward", "activations"),
    ],
)
def test_the_innermost_frames_tell_what_the_memory_was_for(frame: str, cause: str) -> None:
    text = sample("cuda_out_of_memory").replace("2.30 GiB is reserved", "20.00 MiB is reserved")
    exception = ReportedException(
        chain=(("OutOfMemoryError", text),),
        frames=("train.py:main", frame),
        phase="backward",
        device="cuda",
    )
    assert classify_exception(exception).cause == cause


def test_memory_that_is_there_in_pieces_is_fragmentation() -> None:
    assert classify_exception(raised("cuda_out_of_memory")).cause == "fragmentation"


def test_only_a_large_neighbour_on_the_gpu_is_blamed() -> None:
    assert classify_exception(raised("cuda_other_process")).cause == "gpu_other_process"
    assert classify_exception(raised("cuda_other_process.itself")).cause == "gpu_other_process"
    for sample in ("cuda_out_of_memory.container", "cuda_out_of_memory.itself"):
        assert classify_exception(raised(sample)).cause == "activations"
    assert classify_exception(raised("cuda_out_of_memory.small_neighbour")).cause == "activations"


def test_a_wrapper_is_told_by_what_was_printed_behind_it() -> None:
    printed = f"(EngineCore pid=7) ERROR {sample('vllm_kv_too_small')}\n"
    finding = classify_exception(raised("engine_wrapper", phase="load", printed=printed))
    assert finding.outcome is Outcome.OOM_LOAD
    assert finding.cause == "kv_cache"


def test_the_cause_behind_an_exception_counts_and_a_handled_one_before_it_does_not() -> None:
    wrapped = ReportedException(
        chain=(("RuntimeError", "generation failed"), ("MemoryError", "")), phase="rollout"
    )
    assert classify_exception(wrapped).outcome is Outcome.OOM_ROLLOUT
    fallback = ReportedException(
        chain=(("MemoryError", ""), ("KeyError", "'cache'")), phase="rollout"
    )
    assert classify_exception(fallback).outcome is Outcome.OOM_ROLLOUT


def test_the_hosts_memory_is_not_the_gpus() -> None:
    assert classify_exception(raised("cpu_out_of_memory")).outcome is Outcome.OOM_HOST


def test_a_complaint_about_a_lost_peer_is_secondary() -> None:
    assert classify_exception(raised("peer_gone")).secondary


def test_an_unknown_exception_is_a_crash_in_its_own_words() -> None:
    finding = classify_exception(
        ReportedException(
            chain=(("RuntimeError", "who knows"),),
            phase="reward",
            printed="WARNING must be divisible by 8\n",
        )
    )
    assert finding.outcome is Outcome.CRASH
    assert finding.evidence == "RuntimeError: who knows"


def test_endings_without_a_word() -> None:
    assert (
        classify_exit(
            ProcessExit(
                signal=9,
                phase="forward",
                out_of_memory="limit",
            )
        ).outcome
        is Outcome.OOM_FORWARD
    )
    assert (
        classify_exit(
            ProcessExit(
                signal=9,
                phase="forward",
                out_of_memory="machine",
            )
        ).outcome
        is Outcome.OOM_HOST
    )
    for number in (9, 15, 2, 1):
        assert classify_exit(ProcessExit(signal=number, phase="forward")).from_outside
    finding = classify_exit(
        ProcessExit(
            signal=9,
            phase="forward",
            out_of_memory="others",
        )
    )
    assert finding.outcome is Outcome.INTERRUPTED and "used up by others" in finding.evidence
    assert not classify_exit(ProcessExit(signal=11)).from_outside
    assert classify_exit(ProcessExit(exit=0)).outcome is Outcome.CRASH
    aborted = classify_exit(
        ProcessExit(
            signal=6,
            phase="score",
            printed=sample("cannot_allocate"),
        )
    )
    assert aborted.outcome is Outcome.OOM_SCORE
