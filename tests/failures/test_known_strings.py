"""Every known message of failed GRPO runs, and its classification: the table is closed, so all are
listed here."""

from __future__ import annotations

import pytest

from autotune.core.measurement import Outcome
from autotune.failures.classify import classify_exception, classify_line
from autotune.failures.findings import ReportedException
from autotune.failures.table import warning_in
from tests.failures.test_table import read_log

NEVER_OUT_OF_MEMORY = [
    (
        (
            "AssertionError: Error in memory profiling. Initial free memory 30.3 GiB, current free"
            " memory 31 GiB."
        ),
        "gpu_other_process",
    ),
    ("AssertionError: Expandable segments are not compatible with memory pool.", "illegal_config"),
    ("AssertionError: Standby mode is not supported with expandable segments.", "illegal_config"),
    ("RuntimeError: EngineCore failed to start.", None),
    (
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
            " proc(s): {}"
        ),
        None,
    ),
    # Ray says so of any end of a process, and lists memory as one of three that it may have been.
    ("RuntimeError: Worker unexpectedly exits with a connection error code 2. End of file.", None),
    (
        (
            "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for"
            " 1 milliseconds"
        ),
        "hang_or_nccl",
    ),
    (
        "ValueError: The global train batch size (4 x 1) must be divisible by num_generations",
        "illegal_config",
    ),
    (
        "ValueError: vllm_tensor_parallel_size (3) must divide world size (4) evenly.",
        "illegal_config",
    ),
    (
        (
            "AssertionError: real_train_batch_size (9) must be divisible by minimal possible batch"
            " size (8)"
        ),
        "illegal_config",
    ),
    ("AssertionError: max_token_len must be greater than the sequence length.", "illegal_config"),
    ("ValueError: prompt of 1024 tokens leaves no room to generate", "illegal_config"),
    ("AssertionError: group_norm requires n_samples_per_prompt > 1", "illegal_config"),
    (
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "illegal_config",
    ),
]

OUT_OF_MEMORY = [
    (
        (
            "ValueError: No available memory for the cache blocks. Try increasing"
            " `gpu_memory_utilization`."
        ),
        Outcome.OOM_LOAD,
    ),
    (
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy"
            " requests."
        ),
        Outcome.OOM_LOAD,
    ),
    (
        "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        Outcome.OOM_FORWARD,
    ),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        Outcome.OOM_FORWARD,
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        Outcome.OOM_FORWARD,
    ),
    (
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor() (pid=1)",
        Outcome.OOM_FORWARD,
    ),
    ("RuntimeError: The worker may have exceeded K8s pod memory limits.", Outcome.OOM_HOST),
]

IN_A_PRINTED_LINE = [
    "      exitcode  : -9 (pid: 23301)",
    "      traceback : Signal 9 (SIGKILL) received by PID 23301",
    "['/usr/bin/python3', 'main.py'] exits with return code = -9",
    "Killed",
    (
        "To adjust the kill threshold, set the environment variable `RAY_memory_usage_threshold`"
        " when starting Ray."
    ),
]


def raised(text: str) -> ReportedException:
    kind, _, message = text.partition(": ")
    return ReportedException(
        chain=((kind, message),),
        phase="forward",
        device="cuda",
    )


@pytest.mark.parametrize(("text", "cause"), NEVER_OUT_OF_MEMORY)
def test_what_is_no_lack_of_memory_is_never_counted_as_one(text: str, cause: str | None) -> None:
    finding = classify_exception(raised(text))
    assert not finding.outcome.is_out_of_memory and finding.cause == cause
    classified = classify_line(text, is_error=True)
    assert classified is None or not classified.outcome.is_out_of_memory


@pytest.mark.parametrize(("text", "outcome"), OUT_OF_MEMORY)
def test_a_lack_of_memory_is_one(text: str, outcome: Outcome) -> None:
    assert classify_exception(raised(text)).outcome is outcome


@pytest.mark.parametrize("line", IN_A_PRINTED_LINE)
def test_the_machines_memory_is_told_by_a_printed_line(line: str) -> None:
    finding = classify_line(line, is_error=False)
    assert finding is not None and finding.outcome is Outcome.OOM_HOST


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ("gpu_worker.py:initialize_cache", "kv_cache"),
        ("gpu_model_runner.py:_allocate_kv_cache", "kv_cache"),
        ("grpo_trainer.py:_move_model_to_vllm", "weight_sync"),
        ("partition_parameters.py:_all_gather", "zero_gather"),
        ("trl/models/utils.py:unwrap_model_for_generation", "zero_gather"),
        ("transformers/loss/loss_utils.py:fixed_cross_entropy", "logits"),
        ("trl/trainer/grpo_trainer.py:_get_per_token_logps", "logits"),
        ("torch/nn/functional.py:log_softmax", "logits"),
        ("torch/optim/adamw.py:step", "optimizer"),
    ],
)
def test_the_innermost_frame_names_what_the_memory_was_for(frame: str, cause: str) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    kind, _, message = text.partition(": ")
    exception = ReportedException(
        chain=((kind, message),),
        frames=("train.py:<module>", frame),
        phase="forward",
        device="cuda",
    )
    assert classify_exception(exception).cause == cause


def test_what_only_mentions_an_error_is_none() -> None:
    assert read_log("clip_grad_norm_(max_norm=1.0, error_if_nonfinite=False)") is None
    assert (
        classify_line("clip_grad_norm_(max_norm=1.0, error_if_nonfinite=False)", is_error=False)
        is None
    )
    assert warning_in("Sequence group 3 is preempted by PreemptionMode.RECOMPUTE") is not None
