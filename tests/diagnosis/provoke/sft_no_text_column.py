"""A data set that SFT can make nothing of."""

from __future__ import annotations

from parts import rows, sft

sft(data=rows(content="one two three"))
