"""One evaluation, where the user's configuration evaluates: it generates and scores beside the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import trl_material


def wanted(request: Mapping[str, Any]) -> bool:
    return request.get("evaluation") is not None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the framework must be told for it: batch sizes, precision; never when, which a probe decides itself."""
    return dict((request.get("evaluation") or {}).get("settings") or {})


def evaluate(trainer: Any, request: Mapping[str, Any], tokenizer: Any, tokens: int) -> None:
    """One batch at the longest lengths. The prompts are training prompts: brought to one length, they need the same memory."""
    arguments = trainer.args
    generations = getattr(arguments, "num_generations_eval", None) or arguments.num_generations
    rows = -(-arguments.per_device_eval_batch_size * trainer.accelerator.num_processes // generations)
    data = trl_material.prompts(
        request.get("dataset"), rows=rows, group=1, tokenizer=tokenizer, tokens=tokens, seed=arguments.seed
    )
    trainer.evaluate(eval_dataset=data)
