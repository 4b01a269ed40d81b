"""Text in another encoding."""

from __future__ import annotations

from pathlib import Path

from datasets import load_dataset
from parts import sft

Path("rows.txt").write_bytes("Grüße\n".encode("utf-16"))
sft(data=load_dataset("text", data_files="rows.txt", split="train"))
