"""Diagnosis of a log, and its JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.measurement import Phase
from autotune.failures.numbers import Numbers

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Change that helps, with its predicted effect where there is one."""

    change: Mapping[str, str]  # setting under its framework's own name -> direction or new value
    why: str
    predicted: Mapping[str, Any] | None = None  # None without a configuration, or where nothing can be predicted


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """First failure of a log."""

    known: bool  # False where the log contains no known failure, or echoes alone
    is_memory: bool | None = None
    """True where memory ran out, None where that is unknown. Memory that another process released
    while vLLM measured it did not run out, although its cause is `gpu_other_process`."""

    cause: str | None = None  # member of `failures.CAUSES`; `none` for a training that finished; None where unknown
    phase: Phase | None = None
    rank: int | None = None
    evidence: str = ""  # line that decided it
    numbers: Numbers = field(default_factory=dict)  # figures of the message, named as in `failures.NUMBERS`
    remedies: tuple[Advice, ...] = ()
    remarks: tuple[str, ...] = ()  # warnings of the training that are no failures
    configured: Mapping[str, Any] | None = None  # prediction for the configuration itself; None where none was given
    framework: str | None = None  # that the log names, and whose names the remedies have; None: trl, or unknown
    row: str | None = None  # row of the failure table that decided it


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the JSON document."""
    return {"schema": SCHEMA, **dataclasses.asdict(diagnosis)}
