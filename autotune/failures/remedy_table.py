"""Table of remedies, by cause, phase and row."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import msgspec.yaml

from autotune.core.measurement import Phase
from autotune.failures.table import read_table

DIRECTIONS = ("raise", "lower", "on", "off")


class Remedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change of one setting."""

    setting: str = msgspec.field(name="set")
    to: str  # direction (`raise`, `lower`, `on`, `off`) or new value
    why: str

    bounded_by: str | None = None
    """Number of the message that the setting must not exceed, where the message has it."""

    elsewhere: str | None = None  # setting of other frameworks in its place, None: the same
    why_elsewhere: str | None = None  # its reason


class _RemedyTable(msgspec.Struct, forbid_unknown_fields=True):
    shared: dict[str, Remedy]  # remedies that several causes have in common, by name
    by_cause: dict[str, list[str | Remedy]]
    by_phase: dict[str, list[str | Remedy]]  # by cause and phase, as "kv_cache in load"
    by_row: dict[str, list[str | Remedy]]


RemediesByName = dict[str, tuple[Remedy, ...]]


def _resolved(listed: dict[str, list[str | Remedy]], shared: dict[str, Remedy]) -> RemediesByName:
    """Return the remedies with those put in that several causes share."""
    resolved = {}
    for name, remedies in listed.items():
        members = []
        for remedy in remedies:
            if isinstance(remedy, str):
                remedy = shared[remedy]
            members.append(remedy)
        resolved[name] = tuple(members)
    return resolved


_REMEDIES = read_table("remedies", _RemedyTable)

BY_CAUSE = _resolved(_REMEDIES.by_cause, _REMEDIES.shared)

BY_PHASE = _resolved(_REMEDIES.by_phase, _REMEDIES.shared)

BY_ROW = _resolved(_REMEDIES.by_row, _REMEDIES.shared)


def remedies_for(
    cause: str,
    row: str | None = None,
    phase: Phase | None = None,
) -> tuple[Remedy, ...]:
    """Return the remedies of the row, or else those of its cause, in this phase if it has some."""
    of_row = BY_ROW.get(row or "")
    of_phase = BY_PHASE.get(f"{cause} in {phase}")
    return of_row or of_phase or BY_CAUSE[cause]


def shared_remedy(name: str) -> Remedy:
    """Return a remedy that several causes share, by its name in the table."""
    return _REMEDIES.shared[name]


def directions_after(cause: str, row: str | None = None) -> Mapping[str, str]:
    """Return the direction in which each setting must move after this failure; the first remedy
    of a setting counts.
    """
    directions: dict[str, str] = {}
    for remedy in remedies_for(cause, row):
        if remedy.to in DIRECTIONS:
            directions.setdefault(remedy.setting, remedy.to)
    return directions
