"""Online DPO: every micro-step writes two completions to each of its prompts, has them compared and learns from the pair.

TRL keeps it among its experimental trainers. It generates, scores and learns within one training step, so that a cycle is one
optimizer step; its prompts are tokenized where it generates, and are brought to their length there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import trl_hooks, trl_rollouts, trl_settings, trl_units
from .trl_run import MADE_UP_TOKENS, Run

MODULE = "trl.experimental.online_dpo.online_dpo_trainer"
HOOKS = ("_generate", "_forward", "_calculate_rewards_from_functions", "training_step")


class OnlineDpoRun(Run):
    """One trainer, from construction to its end."""

    names = ("OnlineDPOConfig", "OnlineDPOTrainer")

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        package = importlib.import_module(MODULE.rpartition(".")[0])
        return getattr(package, self.names[0]), getattr(package, self.names[1])

    def _course(self, config_class: Any, settings: Mapping[str, Any]) -> trl_units.Course:
        """Every optimizer step is like the one before it."""
        return trl_units.course_of(trl_units.Unit(optimizer_steps=1, generations=1), self.plan)

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """What a completion may be at most stands in its own word, and rows are cut to `max_length` on the left."""
        row = (self.lengths.prompt or MADE_UP_TOKENS) + self.lengths.completion
        longest = min(int(settings.get("max_length") or row), row)
        return super()._config(
            config_class, {**settings, "max_new_tokens": self.lengths.completion, "max_length": longest}, max_steps
        )

    def _data(self, config: Any, course: trl_units.Course) -> Any:
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.stage.world_size
        return self._rows(rows=batch * course.rounds_of_prompts, group=1, seed=config.seed)

    def _ours(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        """Under full tuning the reference is given: under ZeRO-3 the trainer can't copy one."""
        given = super()._ours(trl, config, model, data, model_settings)
        return given if given["peft_config"] is not None else {**given, "ref_model": self.loaded.another()}

    def _rollouts(self, config: Any, settings: Mapping[str, Any]) -> trl_rollouts.Rollouts:
        """None are taken over: what is written belongs to the micro-batch that learns from it."""
        return trl_rollouts.Rollouts(self.stage)

    def remember(self, found: Mapping[str, Any]) -> None:
        """Nothing was generated that others could take over."""

    def _observed(self, trainer_class: Any) -> Any:
        return observed(trainer_class, self.stage, self.lengths, self.seen, self.rollouts)


def observed(
    trainer_class: Any, stage: Any, lengths: trl_settings.Lengths, seen: trl_hooks.Seen, rollouts: trl_rollouts.Rollouts
) -> Any:
    """The trainer's class with phases and lengths around its own methods."""
    import torch

    class ObservedTrainer(trainer_class):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("forward"):
                return super().training_step(*args, **kwargs)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("rollout"), _fitting_prompts(self, lengths):
                return rollouts.turn(lambda: super(ObservedTrainer, self)._generate(*args, **kwargs))

        def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("reward"):
                return super()._calculate_rewards_from_functions(*args, **kwargs)

        def _forward(self, model: Any, prompt_ids: Any, prompt_mask: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                with stage.inside("score"):
                    return super()._forward(model, prompt_ids, prompt_mask, ids, mask, *args, **kwargs)
            kept = max(0, min(prompt_ids.size(1), self.max_length - ids.size(1)))
            trl_hooks.count({"prompt_mask": prompt_mask[:, prompt_mask.size(1) - kept :], "completion_mask": mask}, seen)
            return super()._forward(model, prompt_ids, prompt_mask, ids, mask, *args, **kwargs)

    ObservedTrainer.__name__ = trainer_class.__name__
    return ObservedTrainer


@contextmanager
def _fitting_prompts(trainer: Any, lengths: trl_settings.Lengths) -> Iterator[None]:
    """While it generates, the trainer's tokenizer gives prompts of the length that was asked for."""
    plain = trainer.processing_class
    trainer.processing_class = _Fitting(plain, lengths)
    try:
        yield
    finally:
        trainer.processing_class = plain


class _Fitting:
    """A tokenizer whose prompts are brought to their length before they are padded to one another."""

    def __init__(self, plain: Any, lengths: trl_settings.Lengths) -> None:
        self._plain, self._lengths = plain, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        padding = {name: kwargs.pop(name) for name in ("padding", "padding_side", "return_tensors") if name in kwargs}
        rows = [trl_hooks.fit(list(ids), self._lengths) for ids in self._plain(text=text, **kwargs)["input_ids"]]
        return self._plain.pad({"input_ids": rows}, **padding)
