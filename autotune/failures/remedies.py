"""Remedies by cause, read from tables/remedies.yaml. Nothing is computed here, so no remedy states by how much it helps."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from autotune.failures.patterns import read_table

DIRECTIONS = ("raise", "lower", "on", "off")


class Remedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change of one setting."""

    setting: str = msgspec.field(name="set")
    to: str  # direction (`raise`, `lower`, `on`, `off`) or new value
    why: str
    bounded_by: str | None = None  # number of the message that the setting must not exceed, where the message has it
    elsewhere: str | None = None  # setting of other frameworks in its place, None: the same
    why_elsewhere: str | None = None  # its reason


class _RemedyTable(msgspec.Struct, forbid_unknown_fields=True):
    shared: dict[str, Remedy]  # remedies that several causes have in common, by name
    by_cause: dict[str, list[str | Remedy]]
    by_row: dict[str, list[str | Remedy]]


def _read() -> list[dict[str, tuple[Remedy, ...]]]:
    table = read_table("remedies", _RemedyTable)
    return [
        {key: tuple(table.shared[one] if isinstance(one, str) else one for one in listed) for key, listed in remedies.items()}
        for remedies in (table.by_cause, table.by_row)
    ]


BY_CAUSE, BY_ROW = _read()


def remedies_for(cause: str, row: str | None = None) -> tuple[Remedy, ...]:
    """Return the remedies of the row, or else those of its cause."""
    return BY_ROW.get(row or "") or BY_CAUSE[cause]


def directions_after(cause: str, row: str | None = None) -> Mapping[str, str]:
    """Return the direction in which each setting must move after this failure; the first remedy of a setting counts."""
    found: dict[str, str] = {}
    for remedy in remedies_for(cause, row):
        if remedy.to in DIRECTIONS:
            found.setdefault(remedy.setting, remedy.to)
    return found
