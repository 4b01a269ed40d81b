"""TRL's asynchronous GRPO: rollouts of chosen lengths in place of a server's, for its own trainer.

The trainer takes a rollout worker and a weight transfer from outside. Those here hold finished
rollouts in a queue, and send nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import seams
from .training_arguments import ForcedLengths

NEVER_STALE = 2**40
"""Version of the weights under which a rollout is younger than any policy."""

PROMPTS = 97
"""Different first tokens of prompts."""


class EndlessQueue:
    """Queue in which the next rollout is always there."""

    def __init__(self, rollouts: Iterator[Any]) -> None:
        self._rollouts = rollouts

    def get(self, timeout: float | None = None) -> Any:
        return next(self._rollouts)

    def qsize(self) -> int:
        return 1


class FinishedRollouts:
    """Rollout worker that has done its work."""

    def __init__(self, rollouts: Iterator[Any]) -> None:
        self.rollout_buffer = EndlessQueue(rollouts)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    """Weight transfer to no server."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None:
        """Pack the weights as vLLM's producer does: one buffer is filled while the one before is sent."""
        import torch

        on_gpu = torch.cuda.is_available()
        streams = [torch.cuda.Stream() if on_gpu else None for _ in range(2)]
        buffers: list[Any] = [None, None]
        for at in itertools.cycle((0, 1)):
            buffers[at] = None
            with torch.cuda.stream(streams[at]) if on_gpu else contextlib.nullcontext():
                buffers[at] = _packed(iterator)
            if buffers[at] is None:
                break
        if on_gpu:
            torch.cuda.synchronize()

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


BUFFER_BYTES = 2**30
"""Bytes beyond which a buffer is sent (`DEFAULT_PACKED_BUFFER_SIZE_BYTES` in vLLM)."""


def _packed(iterator: Iterator[Any]) -> Any:
    """Return the next parameters as one tensor of bytes; None after the last one."""
    import torch

    several: list[Any] = []
    for _, parameter in iterator:
        several.append(parameter.contiguous().view(torch.uint8).view(-1))
        if sum(each.numel() for each in several) > BUFFER_BYTES:
            break
    return torch.cat(several) if several else None


def rollouts(lengths: Callable[[], tuple[int, int]], group_of: Callable[[int], int]) -> Iterator[Any]:
    """Yield rollouts without end, of drawn lengths; `group_of` tells the prompt of each by its number.

    The prompts of different groups differ in their first token, the completions of a group too."""
    import numpy

    rollout = importlib.import_module(f"{seams.ASYNC_GRPO.rpartition('.')[0]}.async_rollout_worker").RolloutSample
    group, prompt, place = -1, 0, 0
    for number in itertools.count():
        drawn, completion = lengths()
        place += 1
        if group_of(number) != group:
            group, prompt, place = group_of(number), drawn, 0
        ids = [5 + group % PROMPTS, *[3] * (prompt - 1), 5 + PROMPTS + place, *[4] * (completion - 1)]
        yield rollout(
            prompt=[], completion=[], input_ids=numpy.array(ids), completion_mask=numpy.array([0] * prompt + [1] * completion),
            old_log_probs=numpy.zeros(len(ids), numpy.float32), advantage=1.0 if place % 2 else -1.0,
            model_version=NEVER_STALE, group_id=group, metrics={"reward": 0.0},
        )  # fmt: skip


def lengths_of(forced: ForcedLengths, *, seed: int) -> Callable[[], tuple[int, int]]:
    """Return a function that draws a prompt's and a completion's length, else returns the longest."""
    draw = random.Random(seed)
    prompts, completions = forced.drawn_prompts or (forced.prompt or 1,), forced.drawn or (forced.completion,)
    return lambda: (draw.choice(prompts), draw.choice(completions))


@contextmanager
def loading(model: Any) -> Iterator[None]:
    """Give the trainer this model in place of the one that it would load."""
    from ..tracing.patching import swapped

    def load(*_: Any, attn_implementation: str, **__: Any) -> Any:
        model.set_attn_implementation(attn_implementation)
        return model

    with swapped(vars(importlib.import_module(seams.ASYNC_GRPO)), seams.REFERENCE_LOADER, load):
        yield
