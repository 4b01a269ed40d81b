"""Asynchronous GRPO, an experimental trainer of TRL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from . import finished_rollouts, hooks, seams, training_arguments
from .traced_method import TracedMethod
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths


class AsyncGrpoRun(TrainerRun):
    """Asynchronous GRPO: the trainer alone. Rollouts are there when it asks for them, and weights go nowhere.

    The trainer loads its model by name, and gets the one in memory.
    """

    module, names = seams.ASYNC_GRPO, ("AsyncGRPOConfig", "AsyncGRPOTrainer")
    reuses_rollouts, steps_are_units = False, True

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return training_arguments.split(self.request["settings"], config_class, trl.ModelConfig)

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """Set the longest completion, and the budget that the trainer would ask a server for."""
        prompt, completion = self.lengths.prompt or DEFAULT_PROMPT_TOKENS, self.lengths.completion
        budget = settings.get("token_budget")
        forced = {"max_completion_length": completion, "token_budget": prompt + completion if budget is None else budget}
        return super()._config(config_class, {**settings, **forced}, max_steps)

    def _arguments(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        arguments = super()._arguments(trl, config, model, data, model_settings)
        del arguments["reward_funcs"]
        return {**arguments, **self._injected(config)}

    def _injected(self, config: Any) -> dict[str, Any]:
        group, draws = config.num_generations, finished_rollouts.lengths_of(self.lengths, seed=config.seed)
        made = finished_rollouts.rollouts(draws, lambda number: number // group)
        return {
            "model": str(self.loaded.folder),
            "rollout_worker": finished_rollouts.FinishedRollouts(made),
            "weight_transfer": finished_rollouts.NoTransfer(),
        }

    def _loading(self) -> AbstractContextManager[None]:
        return finished_rollouts.loading(self.model)

    def _hooks(self) -> dict[str, hooks.Hook]:
        def compute_loss(trainer: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            trained, forwarded = int((inputs["token_index"] >= 0).sum()), int(inputs["attention_mask"].sum())
            self.seen.loss_tokens += trained
            self.seen.prompt_tokens += max(0, forwarded - trained)
            with self.recorder.inside("forward"):
                return original(model, inputs, *args, **kwargs)

        return {"compute_loss": compute_loss, "_sync_weight": hooks.in_phase(self.recorder, "sync")}


class TracedAsyncGrpo(TracedMethod):
    """Finished rollouts, and no weight sync: a trace adds its memory itself."""

    attention = "tree_fa3"  # under which the trainer loads its model

    @contextmanager
    def kernel(self, spec: Mapping[str, Any]) -> Iterator[None]:
        """Register the trainer's attention, on a GPU with the kernel's stand-in."""
        from ..tracing import flash_attention_3
        from ..tracing.patching import swapped

        packing = importlib.import_module(f"{seams.ASYNC_GRPO.rpartition('.')[0]}.packing")
        packing.register_tree_attention()
        on_gpu = spec["device"] == "cuda"
        with swapped(vars(packing), "_flash_attn", lambda: flash_attention_3.KERNEL) if on_gpu else nullcontext():
            yield

    def trainer_class(self, plain: Any, annotator: Any, lengths: TracedLengths) -> Any:
        from ..tracing.patching import attribute

        class Unsynchronised(plain):  # type: ignore[misc]
            def _sync_weight(self) -> None:
                self.model_version += 1

            def get_train_dataloader(self) -> Any:
                with attribute(self.accelerator, "device_placement", True):  # the dispatcher of batches requires it
                    return super().get_train_dataloader()

        Unsynchronised.__name__ = plain.__name__
        return Unsynchronised

    def arguments(self, spec: Mapping[str, Any], settings: Mapping[str, Any], reference: Callable[[], Any]) -> dict[str, Any]:
        """Name the model, which the trainer loads itself. A micro-batch is one row: so many rollouts, over so many prompts."""
        lengths = spec["lengths"]["prompt"], spec["lengths"]["completion"]
        rows, groups = int(spec["settings"]["per_device_train_batch_size"]), int(spec.get("groups") or 1)
        made = finished_rollouts.rollouts(
            lambda: lengths, lambda number: number // rows * groups + number % rows * groups // rows
        )
        return {
            "model": spec["model"]["name"],
            "rollout_worker": finished_rollouts.FinishedRollouts(made),
            "weight_transfer": finished_rollouts.NoTransfer(),
        }

    def columns(self, config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        return {"prompt": ["a"] * rows}
