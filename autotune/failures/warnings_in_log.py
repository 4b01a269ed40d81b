"""Warnings of a training that continues, but loses speed or differs from its configuration."""

from __future__ import annotations

import re

import msgspec

from autotune.failures.patterns import read_table


class KnownWarning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of tables/warnings.yaml."""

    name: str
    pattern: str
    says: str
    """Meaning for the run."""


KNOWN_WARNINGS = read_table("warnings", tuple[KnownWarning, ...])


def warning_in(line: str) -> str | None:
    """Return the meaning of the warning in a line, None where there is none."""
    return next((known.says for known in KNOWN_WARNINGS if re.search(known.pattern, line, re.IGNORECASE)), None)
