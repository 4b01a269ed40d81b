"""A training method of TRL: its classes, its differences from GRPO, and its trainer in a trace."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from ..protocol import Arguments, Request
from . import seams
from .trace_plan import TracedLengths


class TrainingMethod:
    """GRPO. Subclasses for other methods override what differs."""

    module = seams.GRPO
    names = ("GRPOConfig", "GRPOTrainer")
    oldest, newest = seams.OLDEST, seams.NEWEST  # releases that have it
    in_scripts = True  # scripts of the user's own may construct it
    # a generation serves several steps, and other candidates. False: each optimizer step is alike
    has_cycles = True
    rewarded = True  # false: it gets no reward functions
    generates = True
    takes_images = True
    scores = False  # its model has one output, a score
    traced = True  # false: a trace refuses it
    attention: str | None = None  # attention of its model in a trace; None: as requested

    @classmethod
    def classes(cls) -> tuple[Any, Any]:
        """Import the classes of the configuration and of the trainer."""
        module = importlib.import_module(cls.module)
        config_name, trainer_name = cls.names
        return getattr(module, config_name), getattr(module, trainer_name)

    @classmethod
    @contextmanager
    def replaced(cls, replacements: Mapping[str, Any]) -> Iterator[None]:
        """Replace names of the trainer's module, where this release has them."""
        from ..tracing.patching import swapped

        names = vars(importlib.import_module(cls.module))
        with ExitStack() as stack:
            for name in replacements.keys() & names.keys():
                stack.enter_context(swapped(names, name, replacements[name]))
            yield

    # The trainer in a trace.

    @staticmethod
    def traced_kernel(spec: Request) -> AbstractContextManager[None]:
        """Register the attention of a method that brings its own, around construction and loop."""
        return nullcontext()

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        """Return the trainer's class without what a trace can't run."""
        return plain

    @classmethod
    def traced_arguments(cls, spec: Request, reference: Callable[[], Any]) -> Arguments:
        """Return the trainer's arguments that not every method has.

        `reference` builds a reference model under full tuning, and returns None with an adapter.
        """
        if not cls.rewarded:
            return {}

        def reward(completions: Any, **_: Any) -> list[float]:
            return [float(index % 2) for index, _ in enumerate(completions)]

        weights = spec["settings"].get("reward_weights")
        count = len(weights) if isinstance(weights, list) and weights else 1
        return {"reward_funcs": [reward] * count}

    @staticmethod
    def traced_columns(
        config: Any,
        rows: int,
        lengths: TracedLengths,
    ) -> Arguments:
        """Return the columns of the rows, as the trainer prepares them.

        Rows of a trainer that generates are prompts, whose text the trace replaces by tokens.
        """
        return {"prompt": ["a"] * rows}

    @staticmethod
    def single_turn(trainer: Any, completions: list[list[int]]) -> Any:
        """Return these completions as the trainer's generation does.

        An engine returns log-probabilities as well.
        """
        if not trainer.use_vllm:
            return completions, None
        return completions, [[0.0] * len(ids) for ids in completions]
