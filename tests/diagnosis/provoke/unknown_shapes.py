"""A mistake in the user's own loss."""

from __future__ import annotations

import torch
from parts import SMALL, causal_model, rows
from transformers import Trainer, TrainingArguments


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return (model(**inputs).logits - torch.ones(7)).mean()


ids = list(range(3, 19))
Own(
    model=causal_model(),
    args=TrainingArguments(**SMALL),
    train_dataset=rows(input_ids=ids, labels=ids),
).train()
