"""Sequences of different lengths, and a tokenizer that cannot pad."""

from __future__ import annotations

from datasets import Dataset
from parts import MODEL, SMALL, causal_model
from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token = None
data = Dataset.from_list([tokenizer("1 " * length) for length in range(3, 20)])
Trainer(
    model=causal_model(),
    args=TrainingArguments(**SMALL),
    train_dataset=data,
    data_collator=DataCollatorWithPadding(tokenizer),
).train()
