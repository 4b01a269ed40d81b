"""A training that goes well."""

from __future__ import annotations

from parts import grpo

grpo()
