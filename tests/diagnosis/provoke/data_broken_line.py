"""A line of JSON that was cut."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from parts import sft

Path("rows.jsonl").write_text('{"text": "one"}\n{"text": "two"\n')
sft(data=load_dataset("json", data_files="rows.jsonl", split="train"))
