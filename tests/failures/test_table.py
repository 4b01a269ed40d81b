"""The table of failures: one recorded sample a row, whose first line says where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.failures import CAUSES, ROWS, Ending, Raised, Row, judge_ending, judge_raised, read_log
from autotune.measurement import Outcome, Phase
from autotune.units import GIB, MIB

SAMPLES = Path(__file__).parent / "samples"

NUMBERS = {
    "vllm_reservation": {"asked_bytes": int(71.2 * GIB), "free_bytes": int(20.31 * GIB), "total_bytes": int(79.11 * GIB)},
    "vllm_kv_too_small": {"asked_bytes": int(1.75 * GIB), "free_bytes": int(0.98 * GIB), "longest_length": 18352},
    "vllm_kv_too_small_old": {"longest_length": 12016},
    "cuda_other_process": {"asked_bytes": int(1.16 * GIB), "free_bytes": int(1.02 * GIB), "total_bytes": int(79.11 * GIB)},
    "cuda_out_of_memory": {"asked_bytes": int(1.70 * GIB), "free_bytes": 0, "total_bytes": 6 * GIB},
    "cuda_out_of_memory_old": {"asked_bytes": 128 * MIB, "free_bytes": int(24.81 * MIB), "total_bytes": int(11.17 * GIB)},
    "cpu_out_of_memory": {"asked_bytes": 2**30},
    "cpu_out_of_memory_old": {"asked_bytes": 2359296},
    "limit_foreseen": {"total_bytes": 536870912},
    "numpy_memory_error": {"asked_bytes": 2 * GIB},
}


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text().partition("\n")[2].strip()


def raised(name: str, phase: Phase | None = "backward", **more: object) -> Raised:
    kind, _, text = sample(name).partition(": ")
    return Raised(chain=((kind, text),), phase=phase, device="cuda", **more)  # type: ignore[arg-type]


def test_rows_and_samples_are_the_same_set() -> None:
    assert {row.name for row in ROWS} == {file.stem for file in SAMPLES.iterdir()}
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_sample_is_decided_by_its_own_row(row: Row) -> None:
    finding = read_log(sample(row.name))
    assert finding is not None
    assert finding.row == row.name
    assert finding.cause is None or finding.cause in CAUSES
    assert finding.numbers == NUMBERS.get(row.name, {})
    assert finding.evidence
    assert "\n" not in finding.evidence
    expected = {"memory": finding.outcome.is_out_of_memory, "host_memory": finding.outcome is Outcome.OOM_HOST}
    expected |= {
        "illegal": finding.outcome is Outcome.ILLEGAL,
        "other": finding.outcome is Outcome.CRASH,
        "transient": finding.transient,
    }
    assert expected[row.kind]


def test_a_clean_log_is_no_failure() -> None:
    assert read_log("{'loss': 0.1, 'error_if_nonfinite': False}\nTraining done, peak memory 3.2 GiB, out of 4 GiB\n") is None


def test_the_phase_is_where_it_happened_unless_the_text_can_only_come_from_one() -> None:
    assert judge_raised(raised("cuda_out_of_memory")).outcome is Outcome.OOM_BACKWARD
    assert judge_raised(raised("vllm_no_cache_blocks")).outcome is Outcome.OOM_LOAD


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ("/site-packages/vllm/v1/worker/gpu_model_runner.py:_allocate_kv_cache_tensors", "kv_cache"),
        ("/site-packages/trl/trainer/grpo_trainer.py:_move_model_to_vllm", "weight_sync"),
        ("/site-packages/transformers/loss/loss_utils.py:fixed_cross_entropy", "logits"),
        ("/site-packages/torch/optim/adamw.py:_init_group", "optimizer"),
        ("/site-packages/transformers/models/qwen2/modeling_qwen2.py:forward", "activations"),
    ],
)
def test_the_innermost_frames_tell_what_the_memory_was_for(frame: str, cause: str) -> None:
    text = sample("cuda_out_of_memory").replace("2.30 GiB is reserved", "20.00 MiB is reserved")
    told = Raised(chain=(("OutOfMemoryError", text),), frames=("train.py:main", frame), phase="backward", device="cuda")
    assert judge_raised(told).cause == cause


def test_memory_that_is_there_in_pieces_is_fragmentation() -> None:
    assert judge_raised(raised("cuda_out_of_memory")).cause == "fragmentation"


def test_what_the_engine_on_a_cpu_says_reads_like_what_it_says_on_a_gpu() -> None:
    text = "Available memory on node 0 (5.33/5.8 GiB) on startup is less than desired CPU memory utilization (0.99, 5.74 GiB)."
    finding = judge_raised(Raised(chain=(("ValueError", text),), phase="load"))
    assert finding.row == "vllm_reservation"
    assert finding.numbers["asked_bytes"] == int(5.74 * GIB)


def test_a_wrapper_is_told_by_what_was_printed_behind_it() -> None:
    printed = f"(EngineCore pid=7) ERROR {sample('vllm_kv_too_small')}\n"
    finding = judge_raised(raised("engine_wrapper", phase="load", printed=printed))
    assert finding.outcome is Outcome.OOM_LOAD
    assert finding.cause == "kv_cache"


def test_the_cause_behind_an_exception_counts_and_a_handled_one_before_it_does_not() -> None:
    wrapped = Raised(chain=(("RuntimeError", "generation failed"), ("MemoryError", "")), phase="rollout")
    assert judge_raised(wrapped).outcome is Outcome.OOM_ROLLOUT
    fallback = Raised(chain=(("MemoryError", ""), ("KeyError", "'cache'")), phase="rollout")
    assert judge_raised(fallback).outcome is Outcome.OOM_ROLLOUT


def test_the_hosts_memory_is_not_the_gpus() -> None:
    assert judge_raised(raised("cpu_out_of_memory")).outcome is Outcome.OOM_HOST


def test_a_complaint_about_a_lost_peer_is_secondary() -> None:
    assert judge_raised(raised("peer_gone")).secondary


def test_an_unknown_exception_is_a_crash_in_its_own_words() -> None:
    finding = judge_raised(
        Raised(chain=(("RuntimeError", "who knows"),), phase="reward", printed="WARNING must be divisible by 8\n")
    )
    assert finding.outcome is Outcome.CRASH
    assert finding.evidence == "RuntimeError: who knows"


def test_endings_without_a_word() -> None:
    assert judge_ending(Ending(signal=9, phase="forward", out_of_memory="limit")).outcome is Outcome.OOM_FORWARD
    assert judge_ending(Ending(signal=9, phase="forward", out_of_memory="machine")).outcome is Outcome.OOM_HOST
    assert judge_ending(Ending(signal=9, phase="forward")).outcome is Outcome.CRASH
    assert judge_ending(Ending(exit=0)).outcome is Outcome.CRASH
    aborted = judge_ending(Ending(signal=6, phase="score", printed=sample("cannot_allocate")))
    assert aborted.outcome is Outcome.OOM_SCORE
