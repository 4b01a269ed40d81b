"""PPO, an experimental trainer of TRL up to 1.12."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from . import hooks, seams, step_timer
from .trainer_run import TrainerRun


class _Stopped(Exception):
    """Ends PPO's loop."""


class PpoRun(TrainerRun):
    """PPO: policy, reference, critic and reward model, and a `train` that is one long loop.

    The functions that the loop calls from its module are wrapped: generation, scoring, optimizer step.
    """

    module, names = seams.PPO, ("PPOConfig", "PPOTrainer")
    reuses_rollouts, steps_are_units = False, True  # an update: a rollout and all optimizer steps over it
    ends_completions = False  # it generates without an end token

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """Set the episodes, which PPO counts instead of steps. No token ends a completion early."""
        forced = {"response_length": self.lengths.completion, "num_sample_generations": 0, "stop_token": None}
        config = super()._config(config_class, {**settings, **forced, "stop_token_id": None}, max_steps)
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        config.total_episodes = max_steps * rows * self.recorder.world_size
        return config

    def _data(self, config: Any, plan: step_timer.MeasurementPlan) -> Any:
        """Return prompts as token ids, the form that this trainer takes."""
        from datasets import Dataset

        prompts = super()._data(config, plan)["prompt"]
        return Dataset.from_dict({"input_ids": [hooks.fit(self._tokens(prompt), self.lengths) for prompt in prompts]})

    def _tokens(self, prompt: Any) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _arguments(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
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
        """Build the user's reward model, which is also the first critic, or a random one."""
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification

        dtype = getattr(torch, str(self.loaded.request["model"]["dtype"]))
        named = self.request["settings"].get("reward_model_path")
        if named:
            return AutoModelForSequenceClassification.from_pretrained(named, num_labels=1, dtype=dtype)
        config = AutoConfig.from_pretrained(str(self.loaded.folder), num_labels=1)
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)

    def _construct(self, trainer_class: Any, arguments: dict[str, Any]) -> Any:
        import transformers

        class Stopper(transformers.TrainerCallback):  # type: ignore[misc]
            """Stops the loop, which ignores `should_training_stop`."""

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                if control.should_training_stop:
                    raise _Stopped

        return trainer_class(**{**arguments, "callbacks": [*arguments["callbacks"], Stopper()]})

    def _hooks(self) -> dict[str, hooks.Hook]:
        def train(trainer: Any, original: Any) -> None:
            with self._wrapped_loop(trainer), suppress(_Stopped):
                original()

        return {"train": train}

    @contextmanager
    def _wrapped_loop(self, trainer: Any) -> Iterator[None]:
        """Wrap the loop's functions, a micro-batch's accumulation and the optimizer in phases."""
        module, recorder, accelerator = vars(importlib.import_module(seams.PPO)), self.recorder, trainer.accelerator
        reward, accumulate = trainer.reward_model, accelerator.accumulate
        plain = {name: module[name] for name in ("batch_generation", "forward", "get_reward")}
        scoring = hooks.scoring(recorder)

        def get_reward(model: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.inside("reward" if model is reward else "score"):
                return plain["get_reward"](model, *args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return scoring(trainer, plain["forward"], *args, **kwargs)

        def batch_generation(model: Any, queries: Any, rows: int, pad: int, *args: Any, **kwargs: Any) -> Any:
            answers: list[Any] = []  # the turn keeps its return value, and this one has gigabytes of logits
            with recorder.inside("rollout"):
                self.rollouts.turn(lambda: answers.append(plain["batch_generation"](model, queries, rows, pad, *args, **kwargs)))
            answer = answers.pop()
            completions = answer[0][:, queries.shape[1] :]
            # As in the trainer: tokens after the first pad are not learned from.
            before_pad = ((completions == pad).cumsum(1) == 0).int()
            self.seen.add_batch({"prompt_mask": (queries != pad).int(), "completion_mask": before_pad})
            return answer

        @contextmanager
        def learning(*models: Any) -> Iterator[None]:
            with accumulate(*models), recorder.inside("forward"):
                yield

        with ExitStack() as stack:
            stack.callback(module.update, plain)
            module.update(get_reward=get_reward, forward=forward, batch_generation=batch_generation)
            accelerator.accumulate = learning
            hooks.wrap(trainer.optimizer, "step", self.timer.on_pre_optimizer_step, self.timer.on_optimizer_step)
            yield
