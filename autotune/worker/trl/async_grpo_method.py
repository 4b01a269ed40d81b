"""Asynchronous GRPO, an experimental trainer of TRL: rollouts of chosen lengths in place of a
server's.

The trainer takes a rollout worker and a weight transfer from outside. Those here hold finished
rollouts in a queue, and send nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import hooks, seams
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths

NEVER_STALE = 2**40
"""Version of the weights under which a rollout is younger than any policy."""

PROMPTS = 97
"""Different first tokens of prompts."""

BUFFER_BYTES = 2**30
"""Bytes beyond which a buffer is sent (`DEFAULT_PACKED_BUFFER_SIZE_BYTES` in vLLM)."""


class AsyncGrpoRun(TrainerRun):
    """Asynchronous GRPO: the trainer alone. Rollouts are there when it asks for them, and weights
    go nowhere.

    The trainer loads its model by name, and gets the one in memory.
    """

    module, names = seams.ASYNC_GRPO, ("AsyncGRPOConfig", "AsyncGRPOTrainer")
    oldest = seams.ASYNC_OLDEST
    has_cycles = rewarded = generates = takes_images = False  # rewards are the rollout worker's
    attention = "tree_fa3"  # under which the trainer loads its model

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """Set the longest completion, and the budget that the trainer would ask a server for."""
        prompt, completion = self.lengths.prompt or DEFAULT_PROMPT_TOKENS, self.lengths.completion
        budget = settings.get("token_budget")
        forced = {
            "max_completion_length": completion,
            "token_budget": prompt + completion if budget is None else budget,
        }
        return super()._config(config_class, {**settings, **forced}, max_steps)

    def _arguments(
        self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any
    ) -> dict[str, Any]:
        return {
            **super()._arguments(trl, config, model, data, model_settings),
            **self._injected(config),
        }

    def _injected(self, config: Any) -> dict[str, Any]:
        draw, forced = random.Random(config.seed), self.lengths
        prompts, completions = (
            forced.drawn_prompts or (forced.prompt or 1,),
            forced.drawn or (forced.completion,),
        )
        made = rollouts(
            lambda: (draw.choice(prompts), draw.choice(completions)),
            lambda number: number // config.num_generations,
        )
        return {
            "model": str(self.loaded.folder),
            "rollout_worker": FinishedRollouts(made),
            "weight_transfer": NoTransfer(),
        }

    def _loader(self) -> Callable[..., Any]:
        """Give the trainer the loaded model in place of the one that it would load."""

        def load(*_: Any, attn_implementation: str, **__: Any) -> Any:
            self.model.set_attn_implementation(attn_implementation)
            return self.model

        return load

    def _hooks(self) -> dict[str, hooks.Hook]:
        def compute_loss(
            trainer: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            trained, forwarded = (
                int((inputs["token_index"] >= 0).sum()),
                int(inputs["attention_mask"].sum()),
            )
            self.seen.loss_tokens += trained
            self.seen.prompt_tokens += max(0, forwarded - trained)
            with self.recorder.inside("forward"):
                return original(model, inputs, *args, **kwargs)

        return {"compute_loss": compute_loss, "_sync_weight": hooks.in_phase(self.recorder, "sync")}

    @staticmethod
    @contextlib.contextmanager
    def traced_kernel(spec: Mapping[str, Any]) -> Iterator[None]:
        """Register the trainer's attention, on a GPU with the kernel's stand-in."""
        from ..tracing import attention
        from ..tracing.patching import swapped

        packing = importlib.import_module(seams.ASYNC_PACKING)
        packing.register_tree_attention()
        on_gpu = spec["device"] == "cuda"
        with (
            swapped(vars(packing), "_flash_attn", lambda: attention.FLASH3)
            if on_gpu
            else contextlib.nullcontext()
        ):
            yield

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        """Leave the weight sync out: a trace adds its memory itself."""
        from ..tracing.patching import attribute

        class Unsynchronised(plain):  # type: ignore[misc]
            def _sync_weight(self) -> None:
                self.model_version += 1

            def get_train_dataloader(self) -> Any:
                with attribute(
                    self.accelerator, "device_placement", True
                ):  # the dispatcher of batches requires it
                    return super().get_train_dataloader()

        Unsynchronised.__name__ = plain.__name__
        return Unsynchronised

    @classmethod
    def traced_arguments(
        cls, spec: Mapping[str, Any], reference: Callable[[], Any]
    ) -> dict[str, Any]:
        """Name the model, which the trainer loads itself. A micro-batch is one row: so many
        rollouts, over so many prompts.
        """
        lengths = spec["lengths"]["prompt"], spec["lengths"]["completion"]
        rows, groups = (
            int(spec["settings"]["per_device_train_batch_size"]),
            int(spec.get("groups") or 1),
        )
        made = rollouts(
            lambda: lengths, lambda number: number // rows * groups + number % rows * groups // rows
        )
        return {
            "model": spec["model"]["name"],
            "rollout_worker": FinishedRollouts(made),
            "weight_transfer": NoTransfer(),
        }


def rollouts(
    lengths: Callable[[], tuple[int, int]], group_of: Callable[[int], int]
) -> Iterator[Any]:
    """Yield rollouts without end, of drawn lengths; `group_of` tells the prompt of each by its
    number.

    The prompts of different groups differ in their first token, the completions of a group too.
    """
    import numpy

    rollout = importlib.import_module(f"{seams.ASYNC_PACKAGE}.async_rollout_worker").RolloutSample
    group, prompt, place = -1, 0, 0
    for number in itertools.count():
        drawn, completion = lengths()
        place += 1
        if group_of(number) != group:
            group, prompt, place = group_of(number), drawn, 0
        ids = [
            5 + group % PROMPTS,
            *[3] * (prompt - 1),
            5 + PROMPTS + place,
            *[4] * (completion - 1),
        ]
        yield rollout(
            prompt=[],
            completion=[],
            input_ids=numpy.array(ids),
            completion_mask=numpy.array([0] * prompt + [1] * completion),
            old_log_probs=numpy.zeros(len(ids), numpy.float32),
            advantage=1.0 if place % 2 else -1.0,
            model_version=NEVER_STALE,
            group_id=group,
            metrics={"reward": 0.0},
        )


class FinishedRollouts:
    """Rollout worker that has done its work: in its queue, the next rollout is always there."""

    def __init__(self, finished: Iterator[Any]) -> None:
        self.rollout_buffer = SimpleNamespace(
            get=lambda timeout=None: next(finished), qsize=lambda: 1
        )
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    """Weight transfer to no server."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None:
        """Pack the weights as vLLM's producer does: one buffer is filled while the one before is
        sent.
        """
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


def _packed(iterator: Iterator[Any]) -> Any:
    """Return the next parameters as one tensor of bytes; None after the last one."""
    import torch

    several: list[Any] = []
    for _, parameter in iterator:
        several.append(parameter.contiguous().view(torch.uint8).view(-1))
        if sum(each.numel() for each in several) > BUFFER_BYTES:
            break
    return torch.cat(several) if several else None
