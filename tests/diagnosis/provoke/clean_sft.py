"""An SFT run that goes well."""

from __future__ import annotations

from parts import sft

sft()
