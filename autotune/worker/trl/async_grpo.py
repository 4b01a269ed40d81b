"""TRL's asynchronous GRPO: rollouts of chosen lengths in place of a server's, for its own trainer.

The trainer takes a rollout worker and a weight transfer from outside. Those here hold finished
rollouts in a queue, and send nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import seams

NEVER_STALE = 2**40
"""Version of the weights under which a rollout is younger than any policy."""

TREE_ATTENTION = "tree_fa3"
"""Attention under which the trainer loads its model."""


class FinishedRollouts:
    """Rollout worker whose queue is full from the start."""

    def __init__(self, rollouts: Iterator[Any]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for rollout in rollouts:
            self.rollout_buffer.put(rollout)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        """Raise: whoever waits for this queue waits forever."""
        raise RuntimeError("the queue of finished rollouts is empty: the trainer asked for more than were planned")


class NoTransfer:
    """Weight transfer to no server."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:  # gathers each parameter, as a transfer does
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def rollouts(micro_batches: int, *, rows: int, groups: int, prompt: int, completion: int) -> Iterator[Any]:
    """Yield the rollouts of some micro-batches: `rows` in `groups`, whose prompts are shared.

    Completions differ in their first token, prompts of different groups too."""
    import numpy

    rollout = importlib.import_module(f"{seams.ASYNC_GRPO.rpartition('.')[0]}.async_rollout_worker").RolloutSample
    for micro_batch in range(micro_batches):
        for row in range(rows):
            group = micro_batch * groups + row % groups
            asked = [5 + row % groups, *[3] * (prompt - 1)]
            ids = numpy.array([*asked, 64 + row, *[4] * (completion - 1)])
            mask = numpy.array([0] * prompt + [1] * completion)
            yield rollout(
                prompt=[], completion=[], input_ids=ids, completion_mask=mask, old_log_probs=numpy.zeros(len(ids), numpy.float32),
                advantage=1.0, model_version=NEVER_STALE, group_id=group, metrics={"reward": 0.0},
            )  # fmt: skip


# Trace.


def traced_arguments(spec: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """Return the trainer's arguments beside those of every method; it loads the model by its name."""
    lengths = spec["lengths"]
    made = rollouts(
        micro_batches + 1,  # accelerate's dispatcher is one ahead
        rows=int(spec["settings"]["per_device_train_batch_size"]),
        groups=int(spec.get("groups") or 1),
        prompt=lengths["prompt"],
        completion=lengths["completion"],
    )
    return {"model": spec["model"]["name"], "rollout_worker": FinishedRollouts(made), "weight_transfer": NoTransfer()}


def without_sync(trainer_class: Any) -> Any:
    """Return a subclass that sends no weights: a trace adds the memory of a sync itself."""
    from ..tracing.patching import attribute

    class Unsynchronised(trainer_class):  # type: ignore[misc]
        def _sync_weight(self) -> None:
            self.model_version += 1

        def get_train_dataloader(self) -> Any:
            with attribute(self.accelerator, "device_placement", True):  # the dispatcher of batches requires it
                return super().get_train_dataloader()

    Unsynchronised.__name__ = trainer_class.__name__
    return Unsynchronised


@contextmanager
def attention_kernel(spec: Mapping[str, Any]) -> Iterator[None]:
    """Register the trainer's attention, on a GPU with the kernel's stand-in."""
    from ..tracing import flash_attention_3
    from ..tracing.patching import swapped

    packing = importlib.import_module(f"{seams.ASYNC_GRPO.rpartition('.')[0]}.packing")
    packing.register_tree_attention()
    stand_in: Callable[[], Any] = lambda: flash_attention_3.KERNEL
    with swapped(vars(packing), "_flash_attn", stand_in) if spec["device"] == "cuda" else contextlib.nullcontext():
        yield
