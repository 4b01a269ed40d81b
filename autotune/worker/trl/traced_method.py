"""Differences between the methods' trainers in a trace: models, arguments and rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths


class TracedMethod:
    """Trainer that learns from given rows. Subclasses override what differs."""

    generates = False  # the trainer generates
    scores = False  # its model has one output, a score
    attention: str | None = None  # of its model; None: as requested

    def kernel(self, spec: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Make the attention of a method that brings its own known, around construction and loop."""
        return contextlib.nullcontext()

    def trainer_class(self, plain: Any, annotator: Any, lengths: TracedLengths) -> Any:
        return plain

    def arguments(self, spec: Mapping[str, Any], settings: Mapping[str, Any], reference: Callable[[], Any]) -> dict[str, Any]:
        """Return the trainer's arguments beside those of every method; `reference` builds a model under full tuning."""
        return {}

    def prepare(self, trainer: Any, config: Any) -> None:
        """Change the constructed trainer to that of one rank."""

    def columns(self, config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        """Return the columns of the rows, as the trainer prepares them; those of a trainer that generates are prompts."""
        return {"prompt": ["a"] * rows}

    def image_column(self, lengths: TracedLengths) -> tuple[str, int] | None:
        """Return the column of the texts beside images, and their tokens; None: no images."""
        return None

    def single_turn(self, trainer: Any, completions: list[list[int]]) -> Any:
        """Return these completions as the trainer's generation does, with the log-probabilities of an engine."""
        return completions, [[0.0] * len(ids) for ids in completions] if trainer.use_vllm else None


class TracedGroups(TracedMethod):
    """GRPO: compares the completions of a group."""

    generates = True

    def arguments(self, spec: Mapping[str, Any], settings: Mapping[str, Any], reference: Callable[[], Any]) -> dict[str, Any]:
        return {"reward_funcs": rewards(settings)}

    def prepare(self, trainer: Any, config: Any) -> None:
        rows = config.per_device_train_batch_size * config.steps_per_generation
        trainer.num_generations = math.gcd(rows, config.num_generations)  # this rank's part of a group

    def columns(self, config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        return super().columns(config, max(rows, config.generation_batch_size), lengths)

    def image_column(self, lengths: TracedLengths) -> tuple[str, int] | None:
        return "prompt", lengths.prompt


class TracedRloo(TracedGroups):
    """RLOO: its generation returns the completions alone."""

    def single_turn(self, trainer: Any, completions: list[list[int]]) -> Any:
        return completions


def rewards(settings: Mapping[str, Any]) -> list[Any]:
    """Return a reward function for each weight."""

    def reward(completions: Any, **_: Any) -> list[float]:
        return [float(index % 2) for index, _ in enumerate(completions)]

    weights = settings.get("reward_weights")
    return [reward] * (len(weights) if isinstance(weights, list) and weights else 1)
