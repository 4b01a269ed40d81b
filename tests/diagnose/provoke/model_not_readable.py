"""A model that belongs to somebody else."""

from __future__ import annotations

from parts import sft

sft()
