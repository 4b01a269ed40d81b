"""Short excerpts, as people paste them: how many of them are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.diagnosis import diagnose
from tests.every import for_each

HERE = Path(__file__).parent
EXCERPTS: list[dict[str, Any]] = [
    excerpt
    for name in (
        "excerpts",
        *(
            f"excerpts-{which}"
            for which in ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
        ),
    )
    for excerpt in yaml.safe_load((HERE / f"{name}.yaml").read_text())
]
UNNAMED = {
    "facebookresearch/ViewDiff#24": (
        "one device for two ranks is called hang_or_nccl by the authors of three other sets"
    ),
    "vllm-project/vllm#17939": "an engine that did not start, without its reason",
    "qiancheng0/ToolRL#39": "a softmax of torch, without its caller",
}
"""Excerpts that are known not to be named, each with why."""


@for_each(EXCERPTS)
def test_an_excerpt_is_named(excerpt: dict[str, Any]) -> None:
    diagnosis = diagnose(excerpt["text"])
    is_right = diagnosis.cause in (excerpt["cause"], *excerpt.get("also", ()))
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
