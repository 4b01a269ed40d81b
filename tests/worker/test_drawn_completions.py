"""Lengths drawn for completions, on lists; `test_grpo_probe.py` generates completions of such lengths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from autotune.worker.trl import drawn_completions, hooks
from autotune.worker.trl.drawn_completions import LengthDraws
from autotune.worker.trl.training_arguments import ForcedLengths

SAMPLE = [1, 2, 3, 40]


def test_every_part_of_the_distribution_occurs_in_a_batch() -> None:
    drawn = LengthDraws(SAMPLE, seed=1).take([[n] for n in range(40)])
    assert Counter(drawn) == dict.fromkeys(SAMPLE, 10)
    assert drawn != sorted(drawn)


def test_equal_prompts_get_equal_lengths_and_others_not() -> None:
    prompts = [[n, n] for n in range(40)]
    ours, theirs = (LengthDraws(SAMPLE, seed=1) for _ in range(2))
    first, second = ours.take(prompts), ours.take(prompts)
    assert first == theirs.take(prompts)
    assert first != second == theirs.take(prompts)
    assert LengthDraws(SAMPLE, seed=1).take(prompts[::-1]) != first != LengthDraws(SAMPLE, seed=2).take(prompts)


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({}, True),
        ({"use_vllm": True}, True),
        ({"use_vllm": True, "vllm_mode": "server"}, False),
        ({"use_transformers_paged": True}, False),
    ],
)
def test_a_server_has_one_length_for_all(settings: dict[str, Any], each: bool) -> None:
    assert drawn_completions.possible(settings) is each


def test_a_group_has_one_prompt_of_one_drawn_length() -> None:
    lengths = ForcedLengths(prompt=64, completion=8, pad_prompts=True, drawn_prompts=(4, 9, 70))
    fitted = {n: hooks.fit([n] * 30, lengths) for n in range(40)}
    assert {len(ids) for ids in fitted.values()} == {4, 9, 70}
    assert all(hooks.fit([n] * 30, lengths) == ids for n, ids in fitted.items())
