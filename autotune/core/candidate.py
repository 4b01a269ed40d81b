"""Candidate: one full assignment of knobs with the derived framework settings.

Candidates with equal settings are equal, whichever knobs led to them: the id is a hash of the *settings*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

KnobValue: TypeAlias = bool | int | float | str | None  # scalar of YAML and JSON
Knobs: TypeAlias = Mapping[str, KnobValue]


def fingerprint(values: Mapping[str, object]) -> str:
    """Return a short hash of a mapping, independent of the key order."""
    canonical = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Complete point of the search space. A trainer builds it; a probe runner measures it."""

    knobs: Knobs  # knobs of the space, under the framework's names
    settings: Knobs  # all settings passed to the framework, derived ones included
    load: Knobs  # settings that force a reload when they change: model, precision, adapter, engine

    def __post_init__(self) -> None:
        for name in ("knobs", "settings", "load"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @cached_property
    def id(self) -> str:
        return fingerprint(self.settings)

    @cached_property
    def load_key(self) -> str:
        return fingerprint(self.load)

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.id == other.id
