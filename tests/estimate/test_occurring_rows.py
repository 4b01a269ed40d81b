"""Rows of the lengths that occur: padded, packed, and under a token budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths
from autotune.estimate.unknown_facts import fullest_rows

COMPLETIONS = TokenLengths.lognormal("test", 300, 600)
PROMPTS = TokenLengths.lognormal("test", 100, 150)


def composed(**about: Any) -> Composition:
    shape = {"ranks": 2, "micro_batch": 8, "accumulation": 4, "generation_batch": 128, "prompt_length": 512}
    return Composition(
        **{
            "residents": (),
            "completion_length": 1024,
            "checkpointing": True,
            "optimizer": "adamw",
            "packs_rows": True,
            **shape,
            **about,
        }
    )


def test_packed_rows_have_their_own_lengths_and_the_fullest_micro_batch_counts() -> None:
    whole = fullest_rows(composed(micro_batch=64), COMPLETIONS, PROMPTS)
    part = fullest_rows(composed(), COMPLETIONS, PROMPTS)
    assert whole is not None and part is not None
    assert abs(whole[0] - 100) < 5 and abs(whole[1] - 300) < 15
    assert sum(part) > 1.03 * sum(whole)


def test_padded_rows_have_the_longest_of_their_ranks_batch() -> None:
    padded = fullest_rows(composed(packs_rows=False), COMPLETIONS, PROMPTS)
    assert padded == (round(PROMPTS.expected_longest(64)), round(COMPLETIONS.up_to(1024).expected_longest(64)))


def test_unknown_prompts_are_the_longest_and_completions_end_at_the_longest() -> None:
    made = fullest_rows(composed(packs_rows=False, completion_length=400), COMPLETIONS, None)
    assert made is not None and made[0] == 512 and made[1] <= 400


def test_a_token_budget_is_filled_at_any_lengths() -> None:
    assert fullest_rows(replace(composed(), token_budget=True), COMPLETIONS, PROMPTS) is None
