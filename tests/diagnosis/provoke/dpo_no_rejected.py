"""Preferences without the answer that lost."""

from __future__ import annotations

from parts import dpo, rows

dpo(data=rows(prompt="2 + 2 =", chosen=" 4"))
