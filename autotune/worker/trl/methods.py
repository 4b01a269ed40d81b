"""TRL's training methods: the run of each, and its trainer."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from . import finished_rollouts, hooks, seams, step_timer, training_arguments, training_data
from .trainer_run import DEFAULT_PROMPT_TOKENS, TrainerRun


class RlooRun(TrainerRun):
    """GRPO's loop with another advantage and another loss."""

    names = ("RLOOConfig", "RLOOTrainer")


class OfflineRun(TrainerRun):
    """Training on given rows (SFT, DPO): no rollout, and labels decide the tokens in the loss.

    Rows are synthetic or repeated, and get the forced length once the trainer has prepared them.
    """

    reuses_rollouts, steps_are_units = False, True
    columns: Sequence[str] = ("text",)  # columns of a synthetic row

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return training_arguments.split(self.request["settings"], config_class, trl.ModelConfig)

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        """Return rows of the user's dataset, or synthetic ones."""
        from datasets import Dataset

        source = training_data.user_dataset(self.request.get("dataset"))
        if source is not None:
            return self._of_dataset(source, rows=rows, group=group, limit=self._words)
        if self.request.get("images"):
            return self._rows_with_images(rows, "messages", self._words, generates=False)
        draw = random.Random(seed)

        def text() -> str:
            return " ".join(str(draw.randrange(10, 10_000)) for _ in range(self._words))

        return Dataset.from_list([{name: text() for name in self.columns} | self._marks(row) for row in range(rows)])

    def _marks(self, row: int) -> dict[str, Any]:
        """Columns of a synthetic row beside its texts."""
        return {}

    @property
    def _words(self) -> int:
        """Words of a synthetic column. Each has at least one token; longer rows are cut."""
        return (self.lengths.prompt or 0) + self.lengths.completion

    def _column_lengths(self) -> dict[str, int]:
        """Length of each prepared column; `""` is the default."""
        return {"": (self.lengths.prompt or 0) + self.lengths.completion}

    def _arguments(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        adapter = trl.get_peft_config(model_settings)
        return {
            "model": model,
            "args": config,
            "train_dataset": data,
            "processing_class": self.processing,
            "peft_config": adapter,
        }

    def _exercised(self, timing: Any) -> dict[str, Any]:
        return {**super()._exercised(timing), "watched": "offline"}

    def _hooks(self) -> dict[str, hooks.Hook]:
        scored: set[int] = set()

        def prepare(_: Any, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = original(dataset, *args, **kwargs)
            # The trainer does not have its configuration yet; it is among the arguments.
            config = next((one for one in args if hasattr(one, "per_device_train_batch_size")), None)
            packed = getattr(config, "packing", False)  # packs have the maximum length already
            return prepared if packed else training_data.fit_columns(prepared, self._column_lengths())

        def compute_loss(trainer: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.model.training:
                self.seen.add_rows(inputs)
                for module in (trainer.model, getattr(trainer, "ref_model", None)):
                    if module is not None and id(module) not in scored:
                        scored.add(id(module))
                        self._watch_scoring(module)
            with self.recorder.inside("forward"):
                return original(model, inputs, *args, **kwargs)

        return {"_prepare_dataset": prepare, "compute_loss": compute_loss}

    def _watch_scoring(self, module: Any) -> None:
        """Record a reference's pass, a forward without gradients, as phase `score`."""
        import torch

        def before(*_: Any) -> None:
            if not torch.is_grad_enabled() and self.recorder.phase == "forward":
                self.recorder.enter("score")

        def after(*_: Any) -> None:
            if self.recorder.phase == "score":
                self.recorder.leave()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


class SftRun(OfflineRun):
    names = ("SFTConfig", "SFTTrainer")


class DpoRun(OfflineRun):
    """Pairs: a prompt with two answers, both in the loss behind the prompt."""

    names = ("DPOConfig", "DPOTrainer")
    columns = ("prompt", "chosen", "rejected")
    _words = 1  # the trainer drops pairs with a prompt that is too long; short columns are padded

    def _column_lengths(self) -> dict[str, int]:
        prompt, answer = self.lengths.prompt or 1, self.lengths.completion
        return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}


class KtoRun(OfflineRun):
    """Single answers, half of them good ones. A second pass scores each prompt with its neighbour's answer."""

    names = ("KTOConfig", "KTOTrainer")
    columns = ("prompt", "completion")
    _words = 1

    def _marks(self, row: int) -> dict[str, Any]:
        return {"label": row % 2 == 0}

    def _column_lengths(self) -> dict[str, int]:
        return {"": self.lengths.completion, "prompt_ids": self.lengths.prompt or 1}


class RewardRun(OfflineRun):
    """Reward model: pairs of whole rows, each scored at its last token."""

    names = ("RewardConfig", "RewardTrainer")
    columns = ("chosen", "rejected")
    _words = 1


class OnlineDpoRun(TrainerRun):
    """Online DPO: each micro-step generates, compares and learns from two completions per prompt.

    Prompts are tokenised inside the generation, and get their length there.
    """

    names = ("OnlineDPOConfig", "OnlineDPOTrainer")
    reuses_rollouts, steps_are_units = False, True

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        package = importlib.import_module(seams.ONLINE_DPO.rpartition(".")[0])
        return getattr(package, self.names[0]), getattr(package, self.names[1])

    def _config(self, config_class: Any, settings: Mapping[str, Any], max_steps: int) -> Any:
        """Set the completion length, and `max_length`, at which rows are cut on the left."""
        row = (self.lengths.prompt or DEFAULT_PROMPT_TOKENS) + self.lengths.completion
        longest = min(int(settings.get("max_length") or row), row)
        forced = {"max_new_tokens": self.lengths.completion, "max_length": longest}
        return super()._config(config_class, {**settings, **forced}, max_steps)

    def _arguments(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        """Add the reference under full tuning: under ZeRO-3 the trainer can't copy one."""
        arguments = super()._arguments(trl, config, model, data, model_settings)
        return arguments if arguments["peft_config"] is not None else {**arguments, "ref_model": self.loaded.another()}

    def _hooks(self) -> dict[str, hooks.Hook]:
        import torch

        recorder, scoring = self.recorder, hooks.scoring(self.recorder)

        def generate(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            tokenizer = trainer.processing_class
            trainer.processing_class = _FittingTokenizer(tokenizer, self.lengths)
            try:
                with recorder.inside("rollout"):
                    return self.rollouts.turn(lambda: original(*args, **kwargs))
            finally:
                trainer.processing_class = tokenizer

        def forward(
            trainer: Any, original: Any, model: Any, prompt_ids: Any, prompt_mask: Any, ids: Any, mask: Any, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            if torch.is_grad_enabled():
                kept = max(0, min(prompt_ids.size(1), trainer.max_length - ids.size(1)))
                self.seen.add_batch({"prompt_mask": prompt_mask[:, prompt_mask.size(1) - kept :], "completion_mask": mask})
            return scoring(trainer, original, model, prompt_ids, prompt_mask, ids, mask, *args, **kwargs)

        return {
            "training_step": hooks.in_phase(recorder, "forward"),
            "_generate": generate,
            "_calculate_rewards_from_functions": hooks.in_phase(recorder, "reward"),
            "_forward": forward,
        }


class _FittingTokenizer:
    """Tokenizer whose prompts get their forced length before they are padded to each other."""

    def __init__(self, tokenizer: Any, lengths: training_arguments.ForcedLengths) -> None:
        self._tokenizer, self._lengths = tokenizer, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        padding = {name: kwargs.pop(name) for name in ("padding", "padding_side", "return_tensors") if name in kwargs}
        rows = [hooks.fit(list(ids), self._lengths) for ids in self._tokenizer(text=text, **kwargs)["input_ids"]]
        return self._tokenizer.pad({"input_ids": rows}, **padding)


class _Stopped(Exception):
    """Ends PPO's loop."""


class PpoRun(TrainerRun):
    """PPO: policy, reference, critic and reward model, and a `train` that is one long loop.

    The functions that the loop calls from its module are wrapped: generation, scoring, optimizer
    step.
    """

    names = ("PPOConfig", "PPOTrainer")
    reuses_rollouts, steps_are_units = False, True  # an update: a rollout and all optimizer steps over it
    ends_completions = False  # it generates without an end token

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        module = importlib.import_module(seams.PPO)
        return getattr(module, self.names[0]), getattr(module, self.names[1])

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
            with self._wrapped_loop(trainer):
                try:
                    original()
                except _Stopped:
                    return

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

        @contextmanager
        def learning(*models: Any) -> Iterator[None]:
            with accumulate(*models), recorder.inside("forward"):
                yield

        with ExitStack() as stack:
            stack.callback(module.update, plain)
            module.update(get_reward=get_reward, forward=forward, batch_generation=self._generating(plain["batch_generation"]))
            accelerator.accumulate = learning
            timer = self.timer
            hooks.wrap(
                trainer.optimizer,
                "step",
                lambda *_, **__: timer.on_pre_optimizer_step(),
                lambda *_, **__: timer.on_optimizer_step(),
            )
            yield

    def _generating(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def batch_generation(model: Any, queries: Any, rows: int, pad: int, *args: Any, **kwargs: Any) -> Any:
            answers: list[Any] = []  # the turn keeps its return value, and this one has gigabytes of logits
            with self.recorder.inside("rollout"):
                self.rollouts.turn(lambda: answers.append(plain(model, queries, rows, pad, *args, **kwargs)))
            answer = answers.pop()
            completions = answer[0][:, queries.shape[1] :]
            # As in the trainer: tokens after the first pad are not learned from.
            before_pad = ((completions == pad).cumsum(1) == 0).int()
            self.seen.add_batch({"prompt_mask": (queries != pad).int(), "completion_mask": before_pad})
            return answer

        return batch_generation


class AsyncGrpoRun(TrainerRun):
    """Asynchronous GRPO: the trainer alone. Rollouts are there when it asks for them, and weights go nowhere.

    The trainer loads its model by name, and gets the one in memory.
    """

    names = ("AsyncGRPOConfig", "AsyncGRPOTrainer")
    reuses_rollouts, steps_are_units = False, True

    def _classes(self, trl: Any) -> tuple[Any, Any]:
        module = importlib.import_module(seams.ASYNC_GRPO)
        return getattr(module, self.names[0]), getattr(module, self.names[1])

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


@dataclass(frozen=True)
class Method:
    """One of TRL's trainers."""

    run: type[TrainerRun]
    module: str
    newest: str = seams.NEWEST  # last release that has it
    oldest: str = seams.OLDEST


METHODS: Mapping[str, Method] = {
    "grpo": Method(TrainerRun, seams.GRPO),
    "rloo": Method(RlooRun, seams.RLOO),
    "sft": Method(SftRun, seams.SFT),
    "dpo": Method(DpoRun, seams.DPO),
    "kto": Method(KtoRun, seams.KTO, oldest=seams.KTO_OLDEST),
    "reward": Method(RewardRun, seams.REWARD),
    "ppo": Method(PpoRun, seams.PPO, seams.PPO_NEWEST),
    "online-dpo": Method(OnlineDpoRun, seams.ONLINE_DPO),
    "async-grpo": Method(AsyncGrpoRun, seams.ASYNC_GRPO, oldest=seams.ASYNC_OLDEST),
}


def method_of(request: Mapping[str, Any]) -> Method:
    return METHODS[str(request.get("method") or "grpo")]


def trainer_of(request: Mapping[str, Any]) -> Any:
    """Import the method's trainer class."""
    method = method_of(request)
    try:
        return getattr(importlib.import_module(method.module), method.run.names[1])
    except (ModuleNotFoundError, AttributeError) as error:
        message = seams.missing_trainer(method.run.names[1], method.module, method.oldest, method.newest)
        raise seams.UnsupportedFramework(message) from error
