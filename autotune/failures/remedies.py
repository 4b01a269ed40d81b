"""Remedies by cause, read from tables/remedies.yaml. Nothing is computed here, so no remedy states by how much it helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from autotune.failures.patterns import read_table

DIRECTIONS = ("raise", "lower", "on", "off")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Change."""

    change: Mapping[str, str]
    """Setting -> direction (`raise`, `lower`, `on`, `off`) or new value."""

    why: str
    bounded_by: str | None = None
    """Number of the message that the setting must not exceed, where the message has it."""

    elsewhere: str | None = None
    """Setting of other frameworks in its place, and `why_elsewhere` its reason; None: the same."""

    why_elsewhere: str | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    set: str
    to: str
    why: str
    bounded_by: str | None = None
    elsewhere: str | None = None
    why_elsewhere: str | None = None


class _RemedyTable(msgspec.Struct, forbid_unknown_fields=True):
    shared: dict[str, _Entry]
    """Remedies that several causes have in common, by name."""

    by_cause: dict[str, list[str | _Entry]]
    by_row: dict[str, list[str | _Entry]]


def _read() -> tuple[Mapping[str, tuple[Remedy, ...]], Mapping[str, tuple[Remedy, ...]]]:
    table = read_table("remedies", _RemedyTable)

    def remedies(entries: list[str | _Entry]) -> tuple[Remedy, ...]:
        found = [table.shared[entry] if isinstance(entry, str) else entry for entry in entries]
        return tuple(
            Remedy(
                change={entry.set: entry.to},
                why=entry.why,
                bounded_by=entry.bounded_by,
                elsewhere=entry.elsewhere,
                why_elsewhere=entry.why_elsewhere,
            )
            for entry in found
        )

    by_cause = {cause: remedies(entries) for cause, entries in table.by_cause.items()}
    return by_cause, {row: remedies(entries) for row, entries in table.by_row.items()}


BY_CAUSE, BY_ROW = _read()


def remedies_for(cause: str, row: str | None = None) -> tuple[Remedy, ...]:
    """Return the remedies of the row, or else those of its cause."""
    return BY_ROW.get(row or "") or BY_CAUSE[cause]


def directions_after(cause: str, row: str | None = None) -> Mapping[str, str]:
    """Return the direction in which each setting must move after this failure; the first remedy of a setting counts."""
    found: dict[str, str] = {}
    for remedy in remedies_for(cause, row):
        for setting, direction in remedy.change.items():
            if direction in DIRECTIONS:
                found.setdefault(setting, direction)
    return found
