"""Asynchronous GRPO, an experimental trainer of TRL, on rollouts of chosen lengths.

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
from types import SimpleNamespace
from typing import Any

from ..protocol import Arguments, Request, Settings
from . import hooks, seams
from .trace_plan import COMPLETION_ID, PROMPT_ID, TracedLengths
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun

NEVER_STALE = 2**40
"""Version of the weights under which a rollout is younger than any policy."""

DISTINCT_PROMPTS = 97
"""Different first tokens of prompts."""

BUFFER_BYTES = 2**30
"""Bytes beyond which a buffer is sent (`DEFAULT_PACKED_BUFFER_SIZE_BYTES` in vLLM)."""

FIRST_ID = 5
"""First token id by which prompts, and the completions of one, differ."""


class AsyncGrpoRun(TrainerRun):
    """Asynchronous GRPO without its generation.

    Rollouts are ready when the trainer requests them, and weights go nowhere. The trainer loads its
    model by name, and gets the one in memory.
    """

    module = seams.ASYNC_GRPO
    names = ("AsyncGRPOConfig", "AsyncGRPOTrainer")
    oldest = seams.ASYNC_OLDEST
    has_cycles = rewarded = generates = takes_images = False  # rewards are the rollout worker's
    attention = "tree_fa3"  # under which the trainer loads its model

    def _config(
        self,
        config_class: Any,
        settings: Settings,
        max_steps: int,
    ) -> Any:
        """Set the longest completion, and the budget that the trainer would ask a server for."""
        completion = self.lengths.completion
        budget = settings.get("token_budget")
        if budget is None:
            budget = (self.lengths.prompt or DEFAULT_PROMPT_TOKENS) + completion
        forced = {"max_completion_length": completion, "token_budget": budget}
        all_settings = {**settings, **forced}
        return super()._config(config_class, all_settings, max_steps)

    def _arguments(
        self,
        trl: Any,
        config: Any,
        model: Any,
        data: Any,
        model_settings: Any,
    ) -> Arguments:
        arguments = super()._arguments(trl, config, model, data, model_settings)
        return {**arguments, **self._injected(config)}

    def _injected(self, config: Any) -> Arguments:
        lengths = self.lengths
        draw = random.Random(config.seed)
        prompts = lengths.drawn_prompts or (lengths.prompt or 1,)
        completions = lengths.drawn or (lengths.completion,)
        finished = rollouts(
            lambda: (draw.choice(prompts), draw.choice(completions)),
            lambda number: number // config.num_generations,
        )
        return _without_server(str(self.loaded.folder), finished)

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
            loss_tokens = int((inputs["token_index"] >= 0).sum())
            all_tokens = int(inputs["attention_mask"].sum())
            self.counts.loss_tokens += loss_tokens
            self.counts.prompt_tokens += max(0, all_tokens - loss_tokens)
            with self.recorder.inside("forward"):
                return original(model, inputs, *args, **kwargs)

        return {"compute_loss": compute_loss, "_sync_weight": hooks.in_phase(self.recorder, "sync")}

    # The trainer in a trace.

    @staticmethod
    @contextlib.contextmanager
    def traced_kernel(spec: Request) -> Iterator[None]:
        """Register the trainer's attention, on a GPU with the kernel's stand-in."""
        from ..tracing import attention
        from ..tracing.patching import swapped

        packing = importlib.import_module(seams.ASYNC_PACKING)
        packing.register_tree_attention()
        if spec["device"] != "cuda":
            yield
            return
        with swapped(vars(packing), "_flash_attn", lambda: attention.FLASH3):
            yield

    @staticmethod
    def traced_class(plain: Any, lengths: TracedLengths) -> Any:
        """Leave the weight sync out: a trace adds its memory itself."""
        from ..tracing.patching import attribute

        class Unsynchronised(plain):  # type: ignore[misc]
            def _sync_weight(self) -> None:
                self.model_version += 1

            def get_train_dataloader(self) -> Any:
                # The dispatcher of batches requires the placement.
                with attribute(self.accelerator, "device_placement", True):
                    return super().get_train_dataloader()

        Unsynchronised.__name__ = plain.__name__
        return Unsynchronised

    @classmethod
    def traced_arguments(cls, spec: Request, reference: Callable[[], Any]) -> Arguments:
        """Name the model, which the trainer loads itself.

        A micro-batch is one row: several rollouts, over one prompt or more.
        """
        lengths = spec["lengths"]["prompt"], spec["lengths"]["completion"]
        rows = int(spec["settings"]["per_device_train_batch_size"])
        groups = int(spec.get("groups") or 1)

        def group_of(number: int) -> int:
            """Return the prompt: those of a micro-batch have equal numbers of rollouts."""
            micro_batch, row = divmod(number, rows)
            return micro_batch * groups + row * groups // rows

        return _without_server(spec["model"]["name"], rollouts(lambda: lengths, group_of))


def _without_server(model_name: str, finished: Iterator[Any]) -> Arguments:
    """Return the trainer's arguments that replace its server."""
    return {
        "model": model_name,
        "rollout_worker": FinishedRollouts(finished),
        "weight_transfer": NoTransfer(),
    }


def rollouts(
    draw_lengths: Callable[[], tuple[int, int]], group_of: Callable[[int], int]
) -> Iterator[Any]:
    """Yield rollouts of drawn lengths, without end.

    `group_of` returns the prompt of a rollout by its number. The prompts of different groups differ
    in their first token, the completions of a group too.
    """
    import numpy

    worker_module = importlib.import_module(f"{seams.ASYNC_PACKAGE}.async_rollout_worker")
    group, prompt_length, place = -1, 0, 0  # place: position in its group
    for number in itertools.count():
        drawn_prompt_length, completion_length = draw_lengths()
        place += 1
        if group_of(number) != group:  # the next group, whose rollouts share its prompt
            group = group_of(number)
            prompt_length = drawn_prompt_length
            place = 0
        ids = [
            FIRST_ID + group % DISTINCT_PROMPTS,
            *[PROMPT_ID] * (prompt_length - 1),
            FIRST_ID + DISTINCT_PROMPTS + place,
            *[COMPLETION_ID] * (completion_length - 1),
        ]
        yield worker_module.RolloutSample(
            prompt=[],
            completion=[],
            input_ids=numpy.array(ids),
            completion_mask=numpy.array([0] * prompt_length + [1] * completion_length),
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
        """Pack the weights as vLLM's producer does.

        One buffer is filled while the one before is sent.
        """
        import torch

        on_gpu = torch.cuda.is_available()
        streams: list[Any] = [None, None]
        if on_gpu:
            streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        buffers: list[Any] = [None, None]
        for index in itertools.cycle((0, 1)):
            buffers[index] = None
            with _running_on(streams[index]):
                buffers[index] = _packed(iterator)
            if buffers[index] is None:
                break
        if on_gpu:
            torch.cuda.synchronize()


def _running_on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Run on this CUDA stream; without one, as before."""
    import torch

    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _packed(iterator: Iterator[Any]) -> Any:
    """Return the next parameters as one tensor of bytes; None after the last one."""
    import torch

    parts: list[Any] = []
    size = 0
    for _, parameter in iterator:
        part = parameter.contiguous().view(torch.uint8).view(-1)
        parts.append(part)
        size += part.numel()
        if size > BUFFER_BYTES:
            break
    return torch.cat(parts) if parts else None
