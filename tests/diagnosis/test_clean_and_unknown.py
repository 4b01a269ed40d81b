"""Logs of successful trainings, whatever words are in them, and of unknown failures."""

from __future__ import annotations

import pytest

from autotune.diagnosis import diagnose
from tests.diagnosis.around import FRAMES, LATER, START, prefixed, raised, sample

FINISH = (
    "{'train_runtime': 812.3, 'train_samples_per_second': 9.8, 'train_loss': 0.0003, 'epoch':"
    " 1.0}\n"
)

MISLEADING = {
    "non-finite": "clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)",
    "a metric": "{'loss error': 0.02, 'oom': 0, 'killed_rollouts': 3}",
    "prose": (
        "Note: this script is OOM-safe; a worker that is killed is started again without an error."
    ),
    "memory in prose": (
        "If you see CUDA out of memory, lower the batch size. Out of memory errors are explained in"
        " the docs."
    ),
    "a caught one": "skipped one batch: CUDA out of memory",
    "a warning": (
        "WARNING 11-20 18:13:59 [config.py:1] ValueError: 8192 is greater than the derived"
        " max_model_len"
    ),
    "a logged info": (
        "2026-11-20 18:13:59,001 - INFO - retrying: ConnectionError: Connection reset by peer"
    ),
    "a column": "Error rate: 0.0  Exceptions: 0  Tracebacks: 0  Signal 9 of 12  exitcode: 0",
    "allocator": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation out of memory"
    ),
    "a completion": (
        '{"prompt": "why was my job Killed?", "completion": "MemoryError means that memory ran'
        ' out"}'
    ),
    "preemption": (
        "WARNING 11-20 18:14:11 [scheduler.py:1] Sequence group 3 is preempted by"
        " PreemptionMode.RECOMPUTE"
    ),
    "an ignored one": (
        "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + FRAMES + "MemoryError"
    ),
    "a warned one": prefixed(
        "WARNING 11-20 18:14:11 [importing.py:1] ",
        FRAMES + "ImportError: libcuda.so.1: undefined symbol",
    ),
}


@pytest.mark.parametrize("text", MISLEADING.values(), ids=MISLEADING.keys())
def test_a_training_that_finished_is_clean_whatever_is_printed(text: str) -> None:
    for log in (
        f"{START}{text}\n{FINISH}",
        f"{START}{FINISH}{text}\n",
        prefixed("[rank0]: ", f"{START}{text}\n{FINISH}"),
    ):
        diagnosis = diagnose(log)
        assert (diagnosis.known, diagnosis.is_memory, diagnosis.cause) == (True, False, "none"), (
            diagnosis
        )
        assert not diagnosis.remedies and diagnosis.rank is None
        assert "train_runtime" in diagnosis.evidence


@pytest.mark.parametrize("text", MISLEADING.values(), ids=MISLEADING.keys())
def test_misleading_words_do_not_make_a_failure_known(text: str) -> None:
    cut = diagnose(f"{START}{text}\nnothing more\n")
    assert not cut.known and cut.is_memory is None and cut.cause is None and not cut.remedies
    assert cut.evidence == "nothing more"
    failed = diagnose(
        f"{START}{text}\n{raised('TypeError: tokenizer must be a string, not a list')}"
    )
    assert not failed.known
    assert failed.evidence == "TypeError: tokenizer must be a string, not a list"


@pytest.mark.parametrize(
    "ending",
    [
        "Training finished.",
        "[rank0]: Training completed",
        "***** train metrics *****",
        "{'train_runtime': 3}",
    ],
)
def test_other_words_for_the_end(ending: str) -> None:
    assert diagnose(f"{START}{ending}\n").cause == "none"
    assert not diagnose(f"{START}the prompt: why is training finished so early?\n").known


VERL = "(TaskRunner pid=77) Training Progress: 100%|##########| 7/7 [12:44<00:00, 109.14s/it]\n"
LAUNCHED = (
    "[2026-11-20 18:00:00,020] [INFO] [launch.py:256:main] process {pid} spawned with command:"
    " ['python', 'train.py']\n"
)
EXITED = "[2026-11-20 18:30:00,020] [INFO] [launch.py:351:main] Process {pid} exits successfully.\n"


@pytest.mark.parametrize(
    "ending",
    [
        VERL,
        "(TaskRunner pid=77) ('Final validation metrics: '\n",
        "[INFO:swift] End time of running main: 2026-11-20 18:30:00\n",
        "`Trainer.fit` stopped: `max_steps=100` reached.\n",
        "Job 'raysubmit_4Q6GZ' succeeded\n",
        LAUNCHED.format(pid=1)
        + LAUNCHED.format(pid=2)
        + EXITED.format(pid=2)
        + EXITED.format(pid=1),
    ],
)
def test_a_good_end_in_a_frameworks_own_words_counts_where_nothing_failed(ending: str) -> None:
    assert diagnose(START + ending).cause == "none"
    # A bar is drawn once more when it is closed, after whatever went wrong.
    for failed in (
        raised(sample("disk")),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
    ):
        assert diagnose(START + failed + ending).cause != "none"
    assert not diagnose(
        f"{START}{ending}srun: error: node7: task 2: Exited with exit code 1\n"
    ).known


def test_a_launcher_whose_processes_are_not_all_gone_says_nothing() -> None:
    assert not diagnose(
        START + LAUNCHED.format(pid=1) + LAUNCHED.format(pid=2) + EXITED.format(pid=2)
    ).known


CAUGHT = "2026-11-20 18:14:0{step} | train | step {step} skipped: CUDA out of memory\n"


def test_memory_that_ran_out_time_and_again_before_the_end_is_what_ended_it() -> None:
    often = "".join(CAUGHT.format(step=step) for step in range(3))
    for end in ("giving up\n", f"{FRAMES}RuntimeError: three steps skipped in a row\n"):
        diagnosis = diagnose(START + often + end)
        assert (diagnosis.cause, diagnosis.is_memory, diagnosis.phase) == (
            "unknown_memory",
            True,
            None,
        )
    assert not diagnose(f"{START}{often}{{'loss': 0.1}}\ngoing on\n").known
    assert not diagnose(START + often + "on and on\n" * 30).known
    assert diagnose(START + often + FINISH).cause == "none"


@pytest.mark.parametrize("name", ["disk", "cuda_out_of_memory", "network"])
def test_a_failure_after_the_last_step_is_a_failure(name: str) -> None:
    assert diagnose(START + FINISH + raised(sample(name))).cause not in (None, "none")


UNKNOWN = [
    "ZeroDivisionError: division by zero",
    "KeyError: 'advantages'",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "AssertionError",
    (
        "RuntimeError: The size of tensor a (8) must match the size of tensor b (16) at"
        " non-singleton dimension 0"
    ),
    "IndexError: list index out of range",
    "KeyboardInterrupt",
    "mypackage.rewards.Refused: the judge did not answer",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_failure_says_so(text: str) -> None:
    for log in (
        START + raised_always(text),
        START + prefixed("[rank1]: ", raised_always(text)) + LATER.format(other=0, rank=1),
    ):
        diagnosis = diagnose(log)
        assert (
            not diagnosis.known
            and diagnosis.is_memory is None
            and diagnosis.cause is None
            and diagnosis.remedies == ()
        )
        assert diagnosis.evidence == text


def raised_always(text: str) -> str:
    return f"{FRAMES}{text}\n"


def test_an_unknown_failure_is_not_hidden_by_what_it_led_to() -> None:
    later = prefixed("[rank1]: ", raised(sample("numeric")))
    diagnosis = diagnose(
        prefixed("[rank0]: ", raised("ZeroDivisionError: division by zero")) + later
    )
    assert not diagnosis.known and diagnosis.rank == 0


@pytest.mark.parametrize(
    "text", ["", "hello\n", "Segmentation fault (core dumped)\n", "\n\n{'loss': 0.1}\n"]
)
def test_little_is_unknown(text: str) -> None:
    assert not diagnose(text).known
