"""Short excerpts, as people paste them: how many of them are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.diagnosis import diagnose

EXCERPTS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "excerpts.yaml").read_text())
UNNAMED = {"StarsfieldAI/R1-V#44", "IDEA-Research/Rex-Thinker#14"}
"""An attribute that a script of one's own lacks; an exception that Ray cannot repeat."""


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt["source"])
def test_an_excerpt_is_named(excerpt: dict[str, Any]) -> None:
    found = diagnose(excerpt["text"])
    named = found.cause in (excerpt["cause"], *excerpt.get("also", ()))
    assert named == (excerpt["source"] not in UNNAMED), found


def test_at_least_85_percent() -> None:
    assert 1 - len(UNNAMED) / len(EXCERPTS) >= 0.85


@pytest.mark.parametrize(
    "end", ["{'train_runtime': 12.5, 'train_loss': 0.1}", "[INFO:swift] End time of running main: 2025-09-11"]
)
def test_an_abort_after_the_end_of_training_is_named(end: str) -> None:
    log = f"""{{'loss': 0.5, 'epoch': 1.0}}
{end}
terminate called without an active exception
E0911 16:21:58.831000 325 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 1 (pid: 470)
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
    found = diagnose(log)
    assert found.known and found.cause == "none" and not found.is_memory
    assert any("aborted" in remark for remark in found.remarks)
    assert diagnose(log.replace(end, "")).cause is None
