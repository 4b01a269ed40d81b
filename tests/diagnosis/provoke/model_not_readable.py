"""A model that belongs to another user."""

from __future__ import annotations

from parts import sft

sft()
