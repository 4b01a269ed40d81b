"""One evaluation, where the user's configuration evaluates: it generates and scores beside the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def wanted(request: Mapping[str, Any]) -> bool:
    return request.get("evaluation") is not None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the framework must be told for it: batch sizes, precision; never when, which a probe decides itself."""
    return dict((request.get("evaluation") or {}).get("settings") or {})


def evaluate(trainer: Any, rows_of: Callable[..., Any]) -> None:
    """One batch at the longest lengths. The prompts are training prompts: brought to one length, they need the same memory."""
    arguments = trainer.args
    generations = getattr(arguments, "num_generations_eval", None) or getattr(arguments, "num_generations", 1)
    rows = -(-arguments.per_device_eval_batch_size * trainer.accelerator.num_processes // generations)
    trainer.evaluate(eval_dataset=rows_of(rows=rows, group=1, seed=arguments.seed))
