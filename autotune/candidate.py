"""Candidate: one full assignment of knobs, with the settings that follow from it.

Two candidates that lead the framework to the same settings are the same candidate, whatever knobs
were turned: the id is a hash of the *settings*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

KnobValue: TypeAlias = bool | int | float | str | None
"""What a knob can be set to: what YAML and JSON call a scalar."""

Knobs: TypeAlias = Mapping[str, KnobValue]


def fingerprint(values: Mapping[str, object]) -> str:
    """A short hash of a mapping that does not depend on its order."""
    canonical = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the space, complete: a trainer made it, a rig can measure it."""

    knobs: Knobs
    """The space's knobs and the value of each, under the framework's own names."""

    settings: Knobs
    """Everything that the framework is told, the derived settings among it; equal settings, equal candidate."""

    load: Knobs
    """The part that decides what must be loaded anew: model, precision, adapter, engine."""

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
