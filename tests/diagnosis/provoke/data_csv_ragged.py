"""A table whose rows have different lengths."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from parts import sft

Path("rows.csv").write_text("text\none\ntwo,three,four\n")
sft(data=load_dataset("csv", data_files="rows.csv", split="train"))
