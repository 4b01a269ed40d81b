"""Short excerpts, as people paste them: how many of them are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec.yaml
import pytest

from autotune.diagnosis import diagnose
from tests.every import for_each

HERE = Path(__file__).parent
EXCERPTS: list[dict[str, Any]] = [
    excerpt
    for name in (
        "excerpts",
        *(
            f"excerpts-{which}"
            for which in (
                "second",
                "third",
                "fourth",
                "fifth",
                "sixth",
                "seventh",
                "eighth",
                "ninth",
                "tenth",
                "eleventh",
                "twelfth",
            )
        ),
    )
    for excerpt in msgspec.yaml.decode((HERE / f"{name}.yaml").read_text())
]
UNNAMED = {
    "facebookresearch/ViewDiff#24": (
        "one device for two ranks is called hang_or_nccl by the authors of three other sets"
    ),
    "vllm-project/vllm#17939": "an engine that did not start, without its reason",
    "qiancheng0/ToolRL#39": "a softmax of torch, without its caller",
    "ovg-project/kvcached#191": "a count of one project's own cache",
    "verl-project/verl#4308": "an attribute of nothing, which any code may lack",
    "GanjinZero/RRHF#35": "a hangup from outside, which two other sets call no failure of the run",
    "Algorineko/AgenticArXiv-RL#11": "the refused argument stands in the line after its message",
    "OpenRLHF/OpenRLHF#1139": "a lost worker, for which Ray lists three potential causes",
    "pytorch/pytorch#111729": "frames and message in an order that no program prints",
    "open-mmlab/mmsegmentation#2085": "SIGTERM to a data loader: its sender is not known",
}
"""Excerpts that are known not to be named, each with why."""


@for_each(EXCERPTS)
def test_an_excerpt_is_named(excerpt: dict[str, Any]) -> None:
    diagnosis = diagnose(excerpt["text"])
    causes = [excerpt["cause"], *excerpt.get("also", ())]
    if excerpt["cause"] == "none":
        causes.append(None)
    is_right = diagnosis.cause in causes
    assert is_right == (excerpt["source"] not in UNNAMED), diagnosis


def test_the_first_readings_stay_on_record() -> None:
    readings = json.loads(
        (HERE.parents[1] / "benchmarks" / "results" / "diagnose.json").read_text()
    )
    second, third = readings["second_excerpts_first_run"], readings["third_excerpts_first_run"]
    assert (second["named"], second["excerpts"]) == (28, 60)
    assert third["excerpts"] == 20 and third["table"] != second["table"]


def test_sets_without_sight_of_the_tables_are_named_at_85_percent() -> None:
    readings = json.loads(
        (HERE.parents[1] / "benchmarks" / "results" / "diagnose.json").read_text()
    )
    blind, after = readings["sixth_excerpts_first_run"], readings["sixth_excerpts_after_fifth"]
    assert (blind["named"], blind["excerpts"]) == (40, 60) and blind["table"] == readings[
        "fifth_excerpts_first_run"
    ]["table"]
    assert after["excerpts"] == 60 and after["share_named"] >= 0.85
    blind = readings["seventh_excerpts_first_run"]
    assert (blind["named"], blind["excerpts"]) == (52, 60) and blind["table"] == readings[
        "eighth_excerpts_first_run"
    ]["table"]


@pytest.mark.parametrize(
    ("name", "named", "excerpts", "without_failure", "false_alarms"),
    [
        ("ninth", 58, 63, 19, 2),
        ("tenth", 54, 64, 21, 2),
        ("eleventh", 50, 65, 24, 1),
        ("twelfth", 89, 96, 27, 0),
    ],
)
def test_a_set_with_a_rule_was_read_once_after_it(
    name: str,
    named: int,
    excerpts: int,
    without_failure: int,
    false_alarms: int,
) -> None:
    readings = json.loads(
        (HERE.parents[1] / "benchmarks" / "results" / "diagnose.json").read_text()
    )
    first = readings[f"{name}_excerpts_first_run"]
    assert (first["named"], first["excerpts"]) == (named, excerpts)
    assert first["without_failure"] == without_failure
    assert len(first["false_alarms"]) == false_alarms
    assert first["table"] != readings[f"{name}_excerpts_after_mending"]["table"]


QUOTED = "ValueError: loss_mode must be one of 'a' or 'b', got 'c'"


def test_words_that_only_an_excerpt_may_have_count_in_no_log_of_a_run() -> None:
    assert (
        diagnose(f"> {QUOTED}").cause
        == diagnose(f"it says {QUOTED}\nwhy?").cause
        == "illegal_config"
    )
    assert not diagnose(f"{QUOTED}\n" + "a line\n" * 40).known
    assert not diagnose(f"{{'loss': 0.5, 'epoch': 1.0}}\nretrying: {QUOTED}\n").known
    traceback = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 4, in <module>\n   '
        f" check()\n{QUOTED}\n"
    )
    assert not diagnose(traceback).known


def test_a_traceback_that_ends_with_its_frames_is_named_by_its_last() -> None:
    frame = '  File "/venv/lib/python3.11/site-packages/{}", line 7, in {}\n    {}\n'
    for place, cause in (
        (
            ("torch/distributed/rendezvous.py", "_create_c10d_store", "return TCPStore("),
            "hang_or_nccl",
        ),
        (("flash_attn/__init__.py", "<module>", "from flash_attn import x"), "version"),
        (("trl/trainer/grpo_config.py", "check", "raise ValueError("), "illegal_config"),
        (("trl/trainer/grpo_trainer.py", "step", "self.go()"), None),
    ):
        assert diagnose(frame.format(*place)).cause == cause


@pytest.mark.parametrize(
    "end",
    [
        "{'train_runtime': 12.5, 'train_loss': 0.1}",
        "[INFO:swift] End time of running main: 2025-09-11",
    ],
)
def test_an_abort_after_the_end_of_training_is_named(end: str) -> None:
    log = f"""{{'loss': 0.5, 'epoch': 1.0}}
{end}
terminate called without an active exception
E0911 16:21:58.831000 325 torch/distributed/elastic/multiprocessing/api.py:869] \
failed (exitcode: -6) local_rank: 1 (pid: 470)
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 470)
  traceback : Signal 6 (SIGABRT) received by PID 470
============================================================
"""
    diagnosis = diagnose(log)
    assert diagnosis.known and diagnosis.cause == "none" and not diagnosis.is_memory
    assert any("aborted" in remark for remark in diagnosis.remarks)
    assert diagnose(log.replace(end, "")).cause is None


REMARKS = (
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "FutureWarning: `tokenizer` is deprecated and will be removed in version 5.0.0",
    "[WARNING]  async_io: please install the libaio-dev package with apt",
    "NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file",
    "WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL",
    "MXFP4 needs Triton: please install triton. We are falling back to bf16.",
    "WARNING 06-01 12:00:00 [x.py:8] Flashinfer is not installed, skipping its fused pass",
    "loss: 1.9, grad_norm: nan\nloss: 0.9, grad_norm: 3.9",
)


@for_each(REMARKS)
def test_a_remark_of_a_run_that_goes_on_is_no_failure(remark: str) -> None:
    assert not diagnose(remark).known
    assert diagnose(f"{remark}\nOSError: [Errno 28] No space left on device").cause == (
        "disk_or_permission"
    )


def test_lines_that_a_terminal_broke_are_read_as_one() -> None:
    message = "CUDA out of memory occurred when warming up sampler with 1024 dummy requests."
    for broken in (
        message,
        message.replace("1024 ", "1024 \n"),
        message.replace("dummy", "dum\nmy"),
    ):
        assert diagnose(f"RuntimeError: {broken}").cause == "engine_startup"


def test_an_exception_behind_another_in_its_line_is_read() -> None:
    for before in (
        "",
        "Error: ",
        "ERROR:root:",
        "2025-11-20 10:00:01.123 | ERROR    | a.b:f:22 - ",
    ):
        assert diagnose(f"{before}KeyError: 'prompt'").cause == "data"


def test_marks_of_a_word_processor_are_read() -> None:
    mark = "\N{LEFT SINGLE QUOTATION MARK}"
    message = f"OSError: We couldn{mark}t connect to {mark}https://huggingface.co{mark}"
    assert diagnose(message).cause == "network"
    assert diagnose("exits with return code = -9是").cause == "host_ram"


def test_messages_without_their_head_are_read() -> None:
    figures = "(GPU 0; 2.00 GiB total capacity; 1.24 GiB already allocated; 2.88 MiB free; 1.25 GiB"
    assert diagnose(f"Tried to allocate 20.00 MiB {figures} reserved)").is_memory
    assert diagnose("DefaultCPUAllocator: can't allocate memory").cause == "host_ram"
    assert diagnose("cannot import name 'Cache' from 'transformers'").cause == "version"
    refusal = "value error: Target modules(['q_proj'])not found in the base model"
    assert diagnose(refusal).cause == "illegal_config"


WHOLE = """Traceback (most recent call last):
  File "{}", line 7, in read
    handle()
RuntimeError: write error: Disk full
"""


def test_a_quoted_traceback_of_a_package_is_read_by_its_words() -> None:
    quoted = WHOLE.format("/venv/lib/python3.11/site-packages/some/reader.py")
    assert diagnose(quoted).cause == "disk_or_permission"
    # The user's own code may say anything, and a log of a run begins otherwise.
    assert not diagnose(WHOLE.format("/job/train.py")).known
    assert not diagnose("starting\n" * 5 + quoted).known


WITHOUT_DRIVER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total"
    " capacity of 12.00 GiB of which 12.38 MiB is free. Including non-PyTorch memory, this process"
    " has {process} memory in use. Of the allocated memory {allocated} is allocated by PyTorch, and"
    " 10.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("process", ["0 bytes", "17179869184.00 GiB"])
@pytest.mark.parametrize(
    ("allocated", "cause"), [("11.90 GiB", "unknown_memory"), ("46.00 MiB", "gpu_other_process")]
)
def test_torchs_figures_count_where_the_driver_has_none(
    process: str, allocated: str, cause: str
) -> None:
    assert diagnose(WITHOUT_DRIVER.format(process=process, allocated=allocated)).cause == cause


def test_a_job_that_its_scheduler_ended_is_told_so() -> None:
    line = (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-11-20T10:00:00 DUE TO TIME LIMIT ***"
    )
    diagnosis = diagnose(line)
    assert not diagnosis.known
    assert any("time limit" in remark for remark in diagnosis.remarks)
