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


_CAUSES = {
    "weights": "the model's weights",
    "optimizer": "the optimizer's state",
    "activations": "activations of the layers",
    "logits": "logits: a number for each word of the vocabulary at each token",
    "kv_cache": "the KV cache",
    "engine_startup": "the start of the engine",
    "weight_sync": "transfer of the weights to the engine",
    "zero_gather": "gathering weights that ZeRO has sharded",
    "fragmentation": "fragmentation: enough was reserved, in pieces too small",
    "host_ram": "host memory, not GPU memory",
    "gpu_other_process": "another process holds memory of the same GPU",
    "unknown_memory": "purpose not stated in the log",
    "illegal_config": "the configuration is refused",
    "hang_or_nccl": "a lost or waiting process; the log does not contain the reason",
    "version": "a package, driver or device is missing or incompatible",
    "data": "the data set, or a file that is read",
    "disk_or_permission": "the disk: full, or not writable",
    "network": "the network, or a service behind it",
    "cuda_fault": "a fault on the GPU",
    "numeric": "values that are not finite (NaN or inf)",
}
_PHASES = {
    "load": "while loading",
    "rollout": "in the rollout",
    "sync": "while syncing weights",
    "reward": "in the rewards",
    "score": "while scoring",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}
_BYTES = {
    "asked_bytes": "requested",
    "free_bytes": "free",
    "total_bytes": "of",
    "allowed_bytes": "allowed",
    "allocated_bytes": "in tensors",
    "idle_bytes": "idle in torch's cache",
    "process_bytes": "this process",
    "others_bytes": "other processes",
}
_SHARES = {"asked_share": "share configured", "free_share": "share free"}
_TOKENS = {"asked_length": "length requested", "longest_length": "longest length"}
_INDENT = 10


def in_words(diagnosis: Diagnosis, width: int) -> str:
    """Return the failure, its line and the remedies as text."""
    lines = [_row("result", _verdict(diagnosis), width), _row("line", diagnosis.evidence, width)]
    if diagnosis.numbers:
        lines.append(_row("numbers", _numbers(diagnosis.numbers), width))
    if diagnosis.configured is not None:
        lines.append(_row("predicted", f"as configured: {_figures(diagnosis.configured)}", width))
    for position, advice in enumerate(diagnosis.remedies):
        lines.append(_row("" if position else "try", _advised(advice), width))
    lines += [_row("" if position else "note", remark, width) for position, remark in enumerate(diagnosis.remarks)]
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
    where += f", {_PHASES[diagnosis.phase]}" if diagnosis.phase is not None else ""
    if diagnosis.cause == "none":
        return "no failure: the training finished."
    if not diagnosis.known or diagnosis.cause is None:
        return f"unknown{where}: the log contains no known failure. The line below is the closest match, or the last line."
    kind = "memory ran out" if diagnosis.is_memory else "not out of memory"
    return f"{kind}{where}: {_CAUSES[diagnosis.cause]} ({diagnosis.cause})."


def _numbers(numbers: Mapping[str, int | float]) -> str:
    reported = [f"{word} {format_bytes(int(numbers[name]))}" for name, word in _BYTES.items() if name in numbers]
    reported += [f"{word} {numbers[name]:.3g}" for name, word in _SHARES.items() if name in numbers]
    reported += [f"{word} {numbers[name]} tokens" for name, word in _TOKENS.items() if name in numbers]
    if "asked_sequences" in numbers:
        reported.append(f"sequences at once {numbers['asked_sequences']}")
    if "timeout_seconds" in numbers:
        reported.append(f"waited {numbers['timeout_seconds']:g} s")
    return ", ".join(reported)


def _advised(advice: Advice) -> str:
    change = "; ".join(f"{name}: {direction}" for name, direction in advice.change.items())
    words = f"{change} ({advice.why})"
    if advice.predicted is None:
        return words
    effect = advice.predicted
    to = ", ".join(f"{name}={value}" for name, value in effect["change"].items())
    speed = "" if effect["speed_ratio"] is None else f", {effect['speed_ratio']:.2f} times the speed"
    learning = ", changes what is learned" if effect["changes_what_is_learned"] else speed
    return f"{words}. Predicted with {to}: {_figures(effect)}{learning}"


def _figures(figures: Mapping[str, Any]) -> str:
    peak = figures["peak_memory_bytes"]
    fits = {True: "fits", False: "does not fit", None: "can't be decided"}[figures["fits"]]
    return f"{fits}, {format_bytes(peak['value'])} ({format_bytes(peak['low'])} to {format_bytes(peak['high'])})"


def _row(label: str, text: str, width: int) -> str:
    start, indent = label.ljust(_INDENT), " " * _INDENT
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
