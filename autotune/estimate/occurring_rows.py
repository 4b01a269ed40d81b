"""Rows of the lengths that occur: the fullest micro-batch of a generation batch."""

from __future__ import annotations

from statistics import fmean

from autotune.core.composition import Composition
from autotune.core.dataset import TokenLengths

MAX_DRAWN = 4096  # rows drawn of a larger generation batch


def fullest_rows(composition: Composition, completions: TokenLengths, prompts: TokenLengths | None) -> tuple[int, int] | None:
    """Return prompt and completion tokens of a row in the fullest micro-batch. None: they are always the longest.

    Padded rows have the length of the longest of their rank's batch, packed ones their own: the fullest
    micro-batch has the largest mean. A token budget is filled at any lengths. Unknown prompts are the longest.
    """
    if composition.token_budget:
        return None
    longest_prompt, rows = composition.prompt_length, min(MAX_DRAWN, composition.generation_batch // composition.ranks)
    prompts = TokenLengths.of("", [longest_prompt]) if prompts is None else prompts.up_to(longest_prompt)
    completions = completions.up_to(composition.completion_length)
    if not composition.packs_rows:
        return tuple(round(one.expected_longest(max(1, rows))) for one in (prompts, completions))  # type: ignore[return-value]
    each = min(composition.micro_batch, max(1, rows))
    drawn = list(zip(prompts.draw(max(each, rows), seed=1), completions.draw(max(each, rows)), strict=True))
    batches = [drawn[start : start + each] for start in range(0, len(drawn) - each + 1, each)]
    fullest = max(batches, key=lambda batch: sum(map(sum, batch)))
    return tuple(max(1, round(fmean(part))) for part in zip(*fullest, strict=True))  # type: ignore[return-value]
