"""Diagnosis of a log, and its JSON form."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    predicted: Mapping[str, Any] | None = None
    """None without a configuration, or where nothing can be predicted."""


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class Diagnosis:
    """First failure of a log."""

    known: bool  # False where the log contains no known failure, or echoes alone

    is_memory: bool | None = None
    """True where memory ran out, None where that is unknown. Memory that another process released
    while vLLM measured it did not run out, although its cause is `gpu_other_process`."""

    cause: str | None = None
    """Member of `table.CAUSES`; `none` for a training that finished; None where unknown."""

    phase: Phase | None = None
    rank: int | None = None
    evidence: str = ""  # line that decided it

    numbers: Numbers = field(default_factory=dict)
    """Figures of the message, named as in failures/tables/meanings.yaml."""

    remedies: tuple[Advice, ...] = ()
    remarks: tuple[str, ...] = ()  # warnings of the training that are no failures

    configured: Mapping[str, Any] | None = None
    """Prediction for the configuration itself; None where none was given."""

    framework: str | None = None
    """Framework that the log names, and whose names the remedies have; None: trl, or unknown."""

    row: str | None = None  # row of the failure table that decided it

    def __repr__(self) -> str:
        return f"<Diagnosis: {_verdict(self)}>"


def as_document(diagnosis: Diagnosis) -> dict[str, Any]:
    return {"schema": SCHEMA, **dataclasses.asdict(diagnosis)}


_INDENT = 10
VERBS = frozenset("call correct end install lower raise reach read run start upgrade".split())
"""Directions of the remedies that are verbs; other directions are values."""


def in_words(diagnosis: Diagnosis, width: int) -> str:
    """Return the failure, its line and the remedies as text."""
    rows = [
        ("result", _verdict(diagnosis)),
        ("line", diagnosis.evidence),
    ]
    if diagnosis.numbers:
        numbers = ", ".join(_figures_of_message(diagnosis.numbers))
        rows.append(("numbers", numbers))
    if diagnosis.configured is not None:
        rows.append(("predicted", f"as configured: {_figures(diagnosis.configured)}"))
    rows += _labelled("try", map(_advised, diagnosis.remedies))
    rows += _labelled("note", diagnosis.remarks)
    return "\n".join(_row(label, text, width) for label, text in rows)


def _labelled(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield rows of which the first alone has the label."""
    for text in texts:
        yield label, text
        label = ""


def _figures_of_message(numbers: Numbers) -> Iterator[str]:
    for name, number in MEANINGS.numbers.items():
        value = numbers.get(name)
        if value is not None:
            yield _figure(name, number.says, value)


def check_in_words(active: Sequence[ActiveTrap], width: int) -> str:
    """Return the traps of this environment as text, each with its sources."""
    if not active:
        return _row("check", "no known conflict in this environment.", width)
    lines = []
    for trap in active:
        trap_row = _row("trap", f"{trap.says} ({trap.name})", width)
        lines.append(trap_row)
        fix_row = _row("", f"fix: {trap.helps}", width)
        lines.append(fix_row)
        lines += [" " * _INDENT + source for source in trap.sources]
    return "\n".join(lines)


def _verdict(diagnosis: Diagnosis) -> str:
    place = ""
    if diagnosis.rank is not None:
        place += f", on rank {diagnosis.rank}"
    if diagnosis.phase is not None:
        place += f", {MEANINGS.phases[diagnosis.phase]}"
    if diagnosis.cause == "none":
        return f"{MEANINGS.other_causes[diagnosis.cause]}."
    if not diagnosis.known or diagnosis.cause is None:
        return (
            f"unknown{place}: the log contains no known failure. The line below is the closest"
            " match, or the last line."
        )
    kind = "memory ran out" if diagnosis.is_memory else "not out of memory"
    return f"{kind}{place}: {CAUSES[diagnosis.cause]} ({diagnosis.cause})."


def _figure(
    name: str,
    says: str,
    value: int | float,
) -> str:
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
    orders = [_order(name, direction) for name, direction in advice.change.items()]
    change = " and ".join(orders)
    beginning = change[:1].upper()
    text = f"{beginning}{change[1:]}: {advice.why}."
    effect = advice.predicted
    if effect is None:
        return text
    changed = [f"{name}={value}" for name, value in effect["change"].items()]
    settings = ", ".join(changed)
    consequence = ""
    if effect["changes_what_is_learned"]:
        consequence = ", changes what is learned"
    elif effect["speed_ratio"] is not None:
        consequence = f", {effect['speed_ratio']:.2f} times the speed"
    return f"{text} Predicted with {settings}: {_figures(effect)}{consequence}"


def _order(setting: str, direction: str) -> str:
    """Return one change as a clause: "lower X to at most 3", "turn X on", "set X to bfloat16"."""
    verb, _, bound = direction.partition(", ")
    if verb in ("on", "off"):
        return f"turn {setting} {verb}"
    if verb in VERBS:
        order = f"{verb} {setting} {bound}"
        return order.rstrip()
    return f"set {setting} to {direction}"


def _figures(figures: Mapping[str, Any]) -> str:
    peak = figures["peak_memory_bytes"]
    verdicts = {True: "fits", False: "does not fit", None: "can't be decided"}
    fits = verdicts[figures["fits"]]
    return (
        f"{fits}, {format_bytes(peak['value'])} ({format_bytes(peak['low'])} to"
        f" {format_bytes(peak['high'])})"
    )


def _row(
    label: str,
    text: str,
    width: int,
) -> str:
    start = label.ljust(_INDENT)
    indent = " " * _INDENT
    return textwrap.fill(
        text,
        width,
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
