"""A data file that is not there."""

from __future__ import annotations

from datasets import load_dataset
from parts import sft

sft(data=load_dataset("json", data_files="data/train.jsonl", split="train"))
