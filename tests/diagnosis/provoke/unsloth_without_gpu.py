"""unsloth on a machine without a GPU."""

from __future__ import annotations

from unsloth import FastLanguageModel

print(FastLanguageModel)
