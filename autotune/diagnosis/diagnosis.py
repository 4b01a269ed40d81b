"""Diagnosis of a log, and its JSON form."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.core.measurement import Phase
from autotune.core.units import format_bytes
from autotune.failures.environment_traps import ActiveTrap
from autotune.failures.numbers import Numbers
from autotune.failures.table import CAUSES, MEANINGS

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Change that helps, with its predicted effect where there is one."""

    change: Mapping[str, str]  # setting under its framework's own name -> direction or new value
    why: str
    predicted: Mapping[str, Any] | None = (
        None  # None without a configuration, or where nothing can be predicted
    )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """First failure of a log."""

    known: bool  # False where the log contains no known failure, or echoes alone
    is_memory: bool | None = None
    """True where memory ran out, None where that is unknown. Memory that another process released
    while vLLM measured it did not run out, although its cause is `gpu_other_process`."""

    cause: str | None = (
        None  # member of `table.CAUSES`; `none` for a training that finished; None where unknown
    )
    phase: Phase | None = None
    rank: int | None = None
    evidence: str = ""  # line that decided it
    numbers: Numbers = field(
        default_factory=dict
    )  # figures of the message, named as in failures/tables/meanings.yaml
    remedies: tuple[Advice, ...] = ()
    remarks: tuple[str, ...] = ()  # warnings of the training that are no failures
    configured: Mapping[str, Any] | None = (
        None  # prediction for the configuration itself; None where none was given
    )
    framework: str | None = (
        None  # that the log names, and whose names the remedies have; None: trl, or unknown
    )
    row: str | None = None  # row of the failure table that decided it


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    return {"schema": SCHEMA, **dataclasses.asdict(diagnosis)}


_INDENT = 10


def in_words(diagnosis: Diagnosis, width: int) -> str:
    """Return the failure, its line and the remedies as text."""
    lines = [_row("result", _verdict(diagnosis), width), _row("line", diagnosis.evidence, width)]
    if diagnosis.numbers:
        known = (
            (name, one.says, diagnosis.numbers.get(name)) for name, one in MEANINGS.numbers.items()
        )
        figures = (_figure(name, says, value) for name, says, value in known if value is not None)
        lines.append(_row("numbers", ", ".join(figures), width))
    if diagnosis.configured is not None:
        lines.append(_row("predicted", f"as configured: {_figures(diagnosis.configured)}", width))
    for position, advice in enumerate(diagnosis.remedies):
        lines.append(_row("" if position else "try", _advised(advice), width))
    lines += [
        _row("" if position else "note", remark, width)
        for position, remark in enumerate(diagnosis.remarks)
    ]
    return "\n".join(lines)


def check_in_words(active: Sequence[ActiveTrap], width: int) -> str:
    """Return the traps of this environment as text, each with its sources."""
    if not active:
        return _row("check", "no known conflict in this environment.", width)
    lines = []
    for trap in active:
        lines.append(_row("trap", f"{trap.says} ({trap.name})", width))
        lines.append(_row("", f"fix: {trap.helps}", width))
        lines += [" " * _INDENT + source for source in trap.sources]
    return "\n".join(lines)


def _verdict(diagnosis: Diagnosis) -> str:
    where = f", on rank {diagnosis.rank}" if diagnosis.rank is not None else ""
    where += f", {MEANINGS.phases[diagnosis.phase]}" if diagnosis.phase is not None else ""
    if diagnosis.cause == "none":
        return f"{MEANINGS.other_causes[diagnosis.cause]}."
    if not diagnosis.known or diagnosis.cause is None:
        return (
            f"unknown{where}: the log contains no known failure. The line below is the closest"
            " match, or the last line."
        )
    kind = "memory ran out" if diagnosis.is_memory else "not out of memory"
    return f"{kind}{where}: {CAUSES[diagnosis.cause]} ({diagnosis.cause})."


def _figure(name: str, says: str, value: int | float) -> str:
    match name.rpartition("_")[2]:
        case "bytes":
            return f"{says} {format_bytes(int(value))}"
        case "share":
            return f"{says} {value:.3g}"
        case "length":
            return f"{says} {value} tokens"
        case "seconds":
            return f"{says} {value:g} s"
        case _:
            return f"{says} {value}"


def _advised(advice: Advice) -> str:
    change = "; ".join(f"{name}: {direction}" for name, direction in advice.change.items())
    words = f"{change} ({advice.why})"
    if advice.predicted is None:
        return words
    effect = advice.predicted
    to = ", ".join(f"{name}={value}" for name, value in effect["change"].items())
    speed = (
        "" if effect["speed_ratio"] is None else f", {effect['speed_ratio']:.2f} times the speed"
    )
    learning = ", changes what is learned" if effect["changes_what_is_learned"] else speed
    return f"{words}. Predicted with {to}: {_figures(effect)}{learning}"


def _figures(figures: Mapping[str, Any]) -> str:
    peak = figures["peak_memory_bytes"]
    fits = {True: "fits", False: "does not fit", None: "can't be decided"}[figures["fits"]]
    return (
        f"{fits}, {format_bytes(peak['value'])} ({format_bytes(peak['low'])} to"
        f" {format_bytes(peak['high'])})"
    )


def _row(label: str, text: str, width: int) -> str:
    start, indent = label.ljust(_INDENT), " " * _INDENT
    return textwrap.fill(
        text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
