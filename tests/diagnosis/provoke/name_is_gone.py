"""A name that this version no longer has."""

from __future__ import annotations

from transformers import AdamW

print(AdamW)
