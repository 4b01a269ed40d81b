"""A parquet file that was cut."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from parts import sft

Path("rows.parquet").write_bytes(b"PAR1" + b"\x00" * 400)
sft(data=load_dataset("parquet", data_files="rows.parquet", split="train"))
