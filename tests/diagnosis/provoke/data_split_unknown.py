"""A split that the data set does not have."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from parts import sft

Path("rows.jsonl").write_text('{"text": "one"}\n')
sft(data=load_dataset("json", data_files={"train": "rows.jsonl"}, split="training"))
