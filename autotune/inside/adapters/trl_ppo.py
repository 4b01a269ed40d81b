"""PPO, which TRL had among its experimental trainers up to release 1.12: reference, critic and reward model beside the policy.

Its `train` is one long loop of its own. What that calls by name out of its module is watched there: what generates, what scores,
and the optimizer's step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from . import trl_hooks, trl_rollouts, trl_units
from .trl_run import Run

MODULE = "trl.experimental.ppo.ppo_trainer"
HOOKS = ("train", "null_ref_context")
NEWEST = "1.12.0"
"""The last release that has it."""


class PpoRun(Run):
    """One trainer, from construction to its end."""

    names = ("PPOConfig", "PPOTrainer")

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        module = importlib.import_module(MODULE)
        return getattr(module, self.names[0]), getattr(module, self.names[1])

    def _course(self, config_class: Any, settings: Mapping[str, Any]) -> trl_units.Course:
        """An update is a rollout and all optimizer steps over it; each is like the one before it."""
        return trl_units.course_of(trl_units.Unit(optimizer_steps=1, generations=1), self.plan)

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """It counts episodes, not steps. Nothing ends a completion before its length."""
        asked = {**settings, "response_length": self.lengths.completion, "num_sample_generations": 0}
        config = super()._config(config_class, {**asked, "stop_token": None, "stop_token_id": None}, max_steps)
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        config.total_episodes = max_steps * rows * self.stage.world_size
        return config

    def _data(self, config: Any, course: trl_units.Course) -> Any:
        """Prompts as token ids, which is how this trainer takes them."""
        from datasets import Dataset

        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.stage.world_size
        found = self._rows(rows=rows * course.rounds_of_prompts, group=1, seed=config.seed)
        tokens = [trl_hooks.fit(_tokens(self.loaded.tokenizer, prompt), self.lengths) for prompt in found["prompt"]]
        return Dataset.from_dict({"input_ids": tokens})

    def _ours(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        adapter = trl.get_peft_config(model_settings)
        return {
            "args": config,
            "processing_class": self.loaded.tokenizer,
            "model": model,
            "ref_model": None if adapter is not None else self.loaded.another(),
            "reward_model": self._classifier(),
            "value_model": self._classifier(),
            "train_dataset": data,
            "eval_dataset": data,
            "peft_config": adapter,
        }

    def _classifier(self) -> Any:
        """The user's reward model, which the critic begins as too; of the policy's own shape where none is named."""
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        dtype = getattr(torch, str(self.loaded.request["model"]["dtype"]))
        named = self.request["settings"].get("reward_model_path")
        if named:
            return AutoModelForSequenceClassification.from_pretrained(named, num_labels=1, dtype=dtype)
        config = AutoConfig.from_pretrained(str(self.loaded.folder), num_labels=1)
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)

    def _rollouts(self, config: Any, settings: Mapping[str, Any]) -> trl_rollouts.Rollouts:
        """None are taken over: the trainer keeps the logits of what it has written."""
        return trl_rollouts.Rollouts(self.stage)

    def remember(self, found: Mapping[str, Any]) -> None:
        """Nothing was generated that others could take over."""

    def _observed(self, trainer_class: Any) -> Any:
        return observed(trainer_class, self)

    def _construct(self, trainer_class: Any, given: dict[str, Any]) -> Any:
        import transformers

        class Stopper(transformers.TrainerCallback):  # type: ignore[misc]
            """The loop asks nobody whether it should stop."""

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                if control.should_training_stop:
                    raise _Enough

        return trainer_class(**{**given, "callbacks": [*given["callbacks"], Stopper()]})


class _Enough(Exception):
    """So much was seen as was to be seen."""


def observed(trainer_class: Any, run: PpoRun) -> Any:
    """The trainer's class with phases around what its loop calls."""

    class ObservedTrainer(trainer_class):  # type: ignore[misc]
        def train(self) -> None:
            with _watched(self, run):
                try:
                    super().train()
                except _Enough:
                    return

    ObservedTrainer.__name__ = trainer_class.__name__
    return ObservedTrainer


@contextmanager
def _watched(trainer: Any, run: PpoRun) -> Iterator[None]:
    """The loop's functions, the accumulation around a micro-batch, and the optimizer, each in its phase."""
    module, stage, accelerator = vars(importlib.import_module(MODULE)), run.stage, trainer.accelerator
    reward, accumulate, step = trainer.reward_model, accelerator.accumulate, trainer.optimizer.step

    def judged(plain: Callable[..., Any]) -> Callable[..., Any]:
        def get_reward(model: Any, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("reward" if model is reward else "score"):
                return plain(model, *args, **kwargs)

        return get_reward

    @contextmanager
    def learning(*models: Any) -> Iterator[None]:
        with accumulate(*models), stage.inside("forward"):
            yield

    def stepping(*args: Any, **kwargs: Any) -> Any:
        run.watcher.on_pre_optimizer_step()
        done = step(*args, **kwargs)
        run.watcher.on_optimizer_step()
        return done

    instead = {
        "batch_generation": _writing(module["batch_generation"], run),
        "forward": _scoring(module["forward"], stage),
        "get_reward": judged(module["get_reward"]),
    }
    before = {name: module[name] for name in instead}
    with ExitStack() as stack:
        stack.callback(module.update, before)
        module.update(instead)
        accelerator.accumulate, trainer.optimizer.step = learning, stepping
        yield


def _writing(plain: Callable[..., Any], run: PpoRun) -> Callable[..., Any]:
    def batch_generation(model: Any, queries: Any, rows: int, pad: int, *args: Any, **kwargs: Any) -> Any:
        answers: list[Any] = []  # a turn remembers what it is given back, and this is gigabytes of logits
        with run.stage.inside("rollout"):
            run.rollouts.turn(lambda: answers.append(plain(model, queries, rows, pad, *args, **kwargs)))
        answer = answers.pop()
        written = answer[0][:, queries.shape[1] :]
        # As the trainer has it: what follows a first pad is not learned from.
        trl_hooks.count(
            {"prompt_mask": (queries != pad).int(), "completion_mask": ((written == pad).cumsum(1) == 0).int()}, run.seen
        )
        return answer

    return batch_generation


def _scoring(plain: Callable[..., Any], stage: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with stage.inside("score"):
            return plain(*args, **kwargs)

    return forward


def _tokens(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
