"""A trainer written for another version of what it calls."""

from __future__ import annotations

from parts import SMALL, causal_model, rows
from transformers import Trainer, TrainingArguments


class Older(Trainer):
    def compute_loss(
        self,
        model,
        inputs,
        return_outputs=False,
    ):
        return model(**inputs).loss


ids = list(range(3, 19))
Older(
    model=causal_model(),
    args=TrainingArguments(**SMALL),
    train_dataset=rows(input_ids=ids, labels=ids),
).train()
