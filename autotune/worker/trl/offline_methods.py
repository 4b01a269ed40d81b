"""Training on given rows: SFT, DPO, KTO and reward models."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import hooks, seams, training_data
from .trainer_run import TrainerRun

if TYPE_CHECKING:
    from .traced_trainer import TracedLengths


class OfflineRun(TrainerRun):
    """Training on given rows (SFT, DPO): no rollout, and labels decide the tokens in the loss.

    Rows are synthetic or repeated, and get the forced length once the trainer has prepared them.
    """

    has_cycles = rewarded = generates = takes_images = False
    columns: Sequence[str] = ("text",)  # texts of a synthetic row
    labelled = False  # true: every second synthetic row is a good one

    def _rows(self, *, rows: int, group: int, seed: int) -> Any:
        from datasets import Dataset

        source = training_data.user_dataset(self.request.get("dataset"))
        if source is not None:
            return self._of_dataset(source, rows=rows, group=group, limit=self._words)
        if self.request.get("images"):
            images = self.request["images"]
            return training_data.image_rows(
                self.processing, images, "messages", self._words, rows, generates=False
            )
        draw, made = random.Random(seed), []
        for row in range(rows):
            texts = {
                name: " ".join(str(draw.randrange(10, 10_000)) for _ in range(self._words))
                for name in self.columns
            }
            made.append({**texts, "label": row % 2 == 0} if self.labelled else texts)
        return Dataset.from_list(made)

    @property
    def _words(self) -> int:
        """Words of a synthetic column. Each has at least one token; longer rows are cut."""
        return (self.lengths.prompt or 0) + self.lengths.completion

    def _column_lengths(self) -> dict[str, int]:
        """Length of each prepared column; `""` is the default."""
        return {"": (self.lengths.prompt or 0) + self.lengths.completion}

    def _exercised(self) -> dict[str, Any]:
        return {**super()._exercised(), "watched": "offline"}

    def _hooks(self) -> dict[str, hooks.Hook]:
        scored: set[int] = set()

        def prepare(_: Any, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = original(dataset, *args, **kwargs)
            # The trainer does not have its configuration yet; it is among the arguments.
            config = next(
                (one for one in args if hasattr(one, "per_device_train_batch_size")), None
            )
            packed = getattr(config, "packing", False)  # packs have the maximum length already
            return (
                prepared if packed else training_data.fit_columns(prepared, self._column_lengths())
            )

        def compute_loss(
            trainer: Any, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
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
    module, names = seams.SFT, ("SFTConfig", "SFTTrainer")
    takes_images = True

    @staticmethod
    def traced_columns(config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        whole = dataclasses.replace(
            lengths, prompt=lengths.prompt + lengths.completion, completion=1
        )
        return {"input_ids": whole.prompts(rows), "labels": whole.prompts(rows)}


class DpoRun(OfflineRun):
    """Pairs: a prompt with two answers, both in the loss behind the prompt."""

    module, names = seams.DPO, ("DPOConfig", "DPOTrainer")
    columns = ("prompt", "chosen", "rejected")
    _words = 1  # the trainer drops pairs with a prompt that is too long; short columns are padded

    def _column_lengths(self) -> dict[str, int]:
        prompt, answer = self.lengths.prompt or 1, self.lengths.completion
        return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}

    @staticmethod
    def traced_columns(config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        completions = lengths.completions(rows)
        return {
            "prompt_ids": lengths.prompts(rows),
            "chosen_ids": completions,
            "rejected_ids": completions,
        }


class KtoRun(OfflineRun):
    """Single answers, half of them good ones. A second pass scores each prompt with its
    neighbour's answer.
    """

    module, names = seams.KTO, ("KTOConfig", "KTOTrainer")
    oldest = seams.KTO_OLDEST
    columns, labelled = ("prompt", "completion"), True
    _words = 1

    def _column_lengths(self) -> dict[str, int]:
        return {"": self.lengths.completion, "prompt_ids": self.lengths.prompt or 1}

    @staticmethod
    def traced_columns(config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        labels, completions = [row % 2 == 0 for row in range(rows)], lengths.completions(rows)
        columns = {
            "prompt_ids": lengths.prompts(rows),
            "completion_ids": completions,
            "label": labels,
        }
        return columns | ({"KL_completion_ids": completions} if config.loss_type == "kto" else {})


class RewardRun(OfflineRun):
    """Reward model: pairs of whole rows, each scored at its last token."""

    module, names = seams.REWARD, ("RewardConfig", "RewardTrainer")
    scores = True
    columns = ("chosen", "rejected")
    _words = 1

    @staticmethod
    def traced_columns(config: Any, rows: int, lengths: TracedLengths) -> dict[str, Any]:
        both = zip(lengths.prompts(rows), lengths.completions(rows), strict=True)
        whole = [prompt + completion for prompt, completion in both]
        return {"chosen_ids": whole, "rejected_ids": whole}
