"""The next configuration: what the run has shown limits it, and it learns the same."""

from __future__ import annotations

import pytest

from autotune.core.units import GIB
from autotune.guard.own_training import ladder_of
from autotune.guard.step_progress import StepProgress
from autotune.search.shown_room import missing_bytes, room_bytes


def test_what_was_missing_is_left_out_of_the_next_prediction() -> None:
    # The example of the module: 39 of 40 GiB held, 3 requested, 36 predicted.
    numbers = {"asked_bytes": 3 * GIB, "free_bytes": 1 * GIB, "total_bytes": 40 * GIB}
    missing = missing_bytes(numbers, None, 40 * GIB)
    assert missing == 2 * GIB
    assert room_bytes(36 * GIB, missing) == pytest.approx(32.92 * GIB)


def test_a_lower_limit_than_the_known_one_is_believed() -> None:
    # 7 GiB held and 2 requested are refused, although the machine has 40: `ulimit`.
    assert missing_bytes({"asked_bytes": 2 * GIB}, 7 * GIB, 40 * GIB) == 2 * GIB


def test_the_known_limit_says_how_much_was_missing() -> None:
    assert missing_bytes({"asked_bytes": 2 * GIB}, 39 * GIB, 40 * GIB) == 1 * GIB


def test_an_end_without_a_message_is_given_a_twentieth() -> None:
    assert missing_bytes({}, 40 * GIB, 40 * GIB) == 2 * GIB


def test_values_of_placeholders_go_on_together() -> None:
    ladder = ladder_of(["micro=8,4", "steps=1,2"], ["train.py", "{micro}", "--steps={steps}"])
    assert ladder == {"micro": ("8", "4"), "steps": ("1", "2")}


def test_steps_are_read_from_bars_and_lines() -> None:
    # 1. transformers' bar, which evaluation with fewer steps does not move.
    progress = StepProgress(now=0.0)
    progress.feed("\r  3%|3         | 3/100 [00:03<01:37,  1.00s/it]", now=1.0)
    assert (progress.step, progress.total) == (3, 100)
    progress.feed("\r 50%|#####     | 5/10 [00:01<00:01,  4.00it/s]", now=2.0)
    assert progress.step == 3
    progress.feed("Map: 100%|##########| 64/64 [00:00<00:00, 900 examples/s]", now=3.0)
    assert progress.step == 3

    # 2. verl's and ms-swift's lines.
    progress.feed("(TaskRunner pid=1) step:12 - actor/loss:0.1", now=4.0)
    assert progress.step == 12
    progress.feed("{'loss': 0.1, 'global_step/max_steps': '20/100'}", now=5.0)
    assert (progress.step, progress.total) == (20, 100)
