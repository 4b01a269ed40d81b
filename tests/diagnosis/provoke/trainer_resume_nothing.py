"""A run to be resumed that never wrote a checkpoint."""

from __future__ import annotations

from parts import MODEL, SMALL, causal_model, rows
from transformers import Trainer, TrainingArguments

ids = list(range(3, 19))
trainer = Trainer(
    model=causal_model(),
    args=TrainingArguments(**SMALL),
    train_dataset=rows(input_ids=ids, labels=ids),
)
trainer.train(resume_from_checkpoint=True)
print(MODEL)
