"""The cache of data sets on a disk that is full."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_DATASETS_CACHE"] = "out"
from datasets import load_dataset
from parts import sft

row = '{"text": "' + "one two three " * 50 + '"}\n'
Path("rows.jsonl").write_text(row * 20000)
sft(data=load_dataset("json", data_files="rows.jsonl", split="train"))
