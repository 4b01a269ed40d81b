"""The methods that train on given rows, SFT and DPO: the same loop without a rollout, at rows of the longest length.

What differs from GRPO's run: a cycle is one optimizer step, the rows are made (or brought) to the length that was asked for once
the trainer has prepared them, and tokens in the loss are those that have a label.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from . import trl_hooks, trl_material, trl_rollouts, trl_settings, trl_units
from .trl_run import Run

OneOf = Mapping[str, Any]


class OfflineRun(Run):
    """One trainer on given rows."""

    def _settings(self, trl: Any, config_class: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return trl_settings.split(self.request["settings"], config_class, trl.ModelConfig)

    def _course(self, config_class: Any, settings: Mapping[str, Any]) -> trl_units.Course:
        """Every optimizer step is like the one before it."""
        return trl_units.course_of(trl_units.Unit(optimizer_steps=1, generations=1), self.plan)

    def _data(self, config: Any, course: trl_units.Course) -> Any:
        batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.stage.world_size
        return self._rows(rows=batch * course.rounds_of_prompts, group=1, seed=config.seed)

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        """The first rows of the user's dataset, or made-up ones."""
        from datasets import Dataset

        source = trl_material.users(self.request.get("dataset"))
        if source is None:
            return Dataset.from_list(list(made_up(self.made_of, rows, self._words, seed)))
        return trl_material.exactly(source, rows=rows, group=group)

    made_of: Sequence[str] = ("text",)
    """Columns of a made-up row."""

    @property
    def _words(self) -> int:
        """Of a made-up column: a word is at least one token, so rows are never too short, and longer ones are cut."""
        return self._row

    @property
    def _row(self) -> int:
        return (self.lengths.prompt or 0) + self.lengths.completion

    def _ours(self, trl: Any, config: Any, model: Any, data: Any, model_settings: Any) -> dict[str, Any]:
        return {
            "model": model,
            "args": config,
            "train_dataset": data,
            "processing_class": self.loaded.tokenizer,
            "peft_config": trl.get_peft_config(model_settings),
        }

    def _rollouts(self, config: Any, settings: Mapping[str, Any]) -> trl_rollouts.Rollouts:
        """None are run."""
        return trl_rollouts.Rollouts(self.stage)

    def remember(self, found: Mapping[str, Any]) -> None:
        """Nothing was generated that others could take over."""

    def _exercised(self, timing: Any) -> dict[str, Any]:
        return {**super()._exercised(timing), "watched": "offline"}

    def _observed(self, trainer_class: Any) -> Any:
        return observed(trainer_class, self.stage, self.seen, self._longest)

    def _longest(self) -> dict[str, int]:
        """What every prepared column is brought to; `""` is any other."""
        return {"": self._row}


class SftRun(OfflineRun):
    names = ("SFTConfig", "SFTTrainer")


class DpoRun(OfflineRun):
    """A pair is a prompt with two answers: the loss sees both, behind the prompt each."""

    names = ("DPOConfig", "DPOTrainer")
    made_of = ("prompt", "chosen", "rejected")
    _words = 1  # the trainer drops pairs whose prompt alone is too long; what is short is brought to its length

    def _longest(self) -> dict[str, int]:
        prompt, answer = self.lengths.prompt or 1, self.lengths.completion
        return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}


def made_up(columns: Sequence[str], rows: int, words: int, seed: int) -> Any:
    """Texts that differ, of so many words."""
    draw = random.Random(seed)
    for _ in range(rows):
        yield {name: " ".join(str(draw.randrange(10, 10_000)) for _ in range(words)) for name in columns}


def observed(trainer_class: Any, stage: Any, seen: trl_hooks.Seen, longest: Any) -> Any:
    """The trainer's class with phases around its own methods, on rows of the longest length."""
    import torch

    class ObservedTrainer(trainer_class):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            made = super()._prepare_dataset(dataset, *args, **kwargs)
            # Packs are as long as rows may be already.
            return made if getattr(self.args_of(args), "packing", False) else brought_to(made, longest())

        @staticmethod
        def args_of(args: Sequence[Any]) -> Any:
            """The configuration among what `_prepare_dataset` is given, before the trainer has it."""
            return next((one for one in args if hasattr(one, "per_device_train_batch_size")), None)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.model.training:
                count(inputs, seen)
                self._watch_scoring()
            with stage.inside("forward"):
                return super().compute_loss(model, inputs, *args, **kwargs)

        def _watch_scoring(self) -> None:
            """A reference's pass is a forward without gradients, of the model itself or of one beside it."""
            if getattr(self, "_scoring_is_watched", False):
                return
            self._scoring_is_watched = True
            for module in {id(one): one for one in (self.model, getattr(self, "ref_model", None)) if one is not None}.values():
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

        @staticmethod
        def _before(*_: Any) -> None:
            if not torch.is_grad_enabled() and stage.phase == "forward":
                stage.enter("score")

        @staticmethod
        def _after(*_: Any) -> None:
            if stage.phase == "score":
                stage.leave()

    ObservedTrainer.__name__ = trainer_class.__name__
    return ObservedTrainer


def brought_to(rows: Any, longest: Mapping[str, int]) -> Any:
    """Every column of tokens at exactly its length: repeated where it is shorter, cut where it is longer."""
    columns = {name: longest.get(name, longest.get("")) for name in rows.column_names}
    wanted = {name: length for name, length in columns.items() if length and _holds_tokens(rows, name)}

    def fitted(row: OneOf) -> dict[str, list[int]]:
        return {name: (row[name] * -(-length // max(1, len(row[name]))))[:length] for name, length in wanted.items()}

    return rows.map(fitted) if wanted else rows


def _holds_tokens(rows: Any, name: str) -> bool:
    first = next((row[name] for row in rows), None)
    return isinstance(first, list) and bool(first) and isinstance(first[0], int)


def count(inputs: OneOf, seen: trl_hooks.Seen) -> None:
    """Tokens of one micro-batch: those in the loss, the others, and how long its rows are."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    # A label is the token after: the first of a row is nobody's.
    in_loss = inputs["completion_mask"] if "completion_mask" in inputs else inputs["labels"][:, 1:] != -100
    whole = int(ids.numel() if mask is None else mask.sum())
    tokens = int(in_loss.sum())
    seen.loss_tokens += tokens
    seen.prompt_tokens += max(0, whole - tokens)
    if mask is None and inputs.get("position_ids") is not None:
        rows = max(1, int((inputs["position_ids"] == 0).sum()))
        lengths = [ids.numel() // rows]  # flattened: as long as its rows are on the average
    else:
        lengths = [int(length) for length in (mask.sum(1) if mask is not None else [ids.shape[1]])]
    seen.longest_prompt = max(seen.longest_prompt, *lengths)
    seen.shortest_prompt = min(seen.shortest_prompt or min(lengths), *lengths)
