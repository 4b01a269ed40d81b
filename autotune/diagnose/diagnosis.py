"""What a log says of its end, and how that is written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.failures import Numbers
from autotune.measurement import Phase

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change that helps, and by how much where that was predicted."""

    change: Mapping[str, str]
    """Setting under its framework's own name -> direction, or the value to give it."""

    why: str
    predicted: Mapping[str, Any] | None = None
    """What it would do, as far as that can be predicted; None without a configuration, or where nothing can be said."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a log says of its end."""

    known: bool
    """False: nothing in the log is known, or only echoes of something that is not in it."""

    is_memory: bool | None = None
    """Whether memory ran out; None where that is not known. Memory that another process gave back while vLLM measured
    it did not run out, though its cause is `gpu_other_process`."""

    cause: str | None = None
    """One of `failures.CAUSES`; `none` for a log of a training that finished; None where unknown."""

    phase: Phase | None = None
    rank: int | None = None
    evidence: str = ""
    """The line that decided it."""

    numbers: Numbers = field(default_factory=dict)
    """What the message itself measured, by the names of `failures.NUMBERS`."""

    remedies: tuple[Advice, ...] = ()
    remarks: tuple[str, ...] = ()
    """What the training said while it ran: no failure, and yet of interest."""

    configured: Mapping[str, Any] | None = None
    """What the configuration itself was predicted to need; None where none was given."""

    row: str | None = None
    """The row of the table of failures that decided it."""


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The one JSON document."""
    return {"schema": SCHEMA, **dataclasses.asdict(diagnosis)}
