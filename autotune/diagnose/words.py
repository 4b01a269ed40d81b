"""A diagnosis and a check of the environment, in words for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.diagnose.diagnosis import Advice, Diagnosis
from autotune.failures import Sprung
from autotune.units import format_bytes

_CAUSES = {
    "weights": "the model's weights",
    "optimizer": "the optimizer's state",
    "activations": "activations of the layers",
    "logits": "logits: a number for each word of the vocabulary at each token",
    "kv_cache": "the KV cache",
    "engine_startup": "the start of the engine",
    "weight_sync": "handing the weights to the engine",
    "zero_gather": "gathering weights that ZeRO has spread",
    "fragmentation": "fragmentation: enough was reserved, in pieces too small",
    "host_ram": "the machine's own memory, not the GPU's",
    "gpu_other_process": "another process holds memory of the same GPU",
    "unknown_memory": "the log does not say what for",
    "illegal_config": "the configuration is refused",
    "hang_or_nccl": "a lost or waiting process; what it waited for is not in this log",
    "version": "a package, driver or device is missing, or does not go with another",
    "data": "the data set, or a file that is read",
    "disk_or_permission": "the disk: full, or not to be written",
    "network": "the network, or what is behind it",
    "cuda_fault": "a fault on the GPU",
    "numeric": "numbers that are none any more",
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
    "asked_bytes": "asked",
    "free_bytes": "free",
    "total_bytes": "of",
    "allowed_bytes": "allowed",
    "allocated_bytes": "in tensors",
    "idle_bytes": "idle in torch's cache",
    "process_bytes": "this process",
    "others_bytes": "other processes",
}
_SHARES = {"asked_share": "share asked", "free_share": "share free"}
_TOKENS = {"asked_length": "length asked", "longest_length": "longest length"}
_INDENT = 10


def in_words(diagnosis: Diagnosis, width: int) -> str:
    """What failed, the line that says so, and what to try."""
    lines = [_row("result", _verdict(diagnosis), width), _row("line", diagnosis.evidence, width)]
    if diagnosis.numbers:
        lines.append(_row("numbers", _numbers(diagnosis.numbers), width))
    if diagnosis.configured is not None:
        lines.append(_row("predicted", f"as configured: {_figures(diagnosis.configured)}", width))
    for position, advice in enumerate(diagnosis.remedies):
        lines.append(_row("" if position else "try", _advised(advice), width))
    lines += [_row("" if position else "note", remark, width) for position, remark in enumerate(diagnosis.remarks)]
    return "\n".join(lines)


def check_in_words(sprung: Sequence[Sprung], width: int) -> str:
    """What is known to go wrong in this environment, each with where that is known from."""
    if not sprung:
        return _row("check", "none of the known traps is in this environment.", width)
    lines = []
    for trap in sprung:
        lines.append(_row("trap", f"{trap.says} ({trap.name})", width))
        lines.append(_row("", f"way out: {trap.helps}", width))
        lines += [" " * _INDENT + source for source in trap.sources]
    return "\n".join(lines)


def _verdict(diagnosis: Diagnosis) -> str:
    where = "".join(
        [
            f", on rank {diagnosis.rank}" if diagnosis.rank is not None else "",
            f", {_PHASES[diagnosis.phase]}" if diagnosis.phase is not None else "",
        ]
    )
    if diagnosis.cause == "none":
        return "no failure: the training finished."
    if not diagnosis.known or diagnosis.cause is None:
        return f"unknown{where}: this log holds no failure that is known. Nearest to one, or simply its last, is this line."
    kind = "memory ran out" if diagnosis.is_memory else "not out of memory"
    return f"{kind}{where}: {_CAUSES[diagnosis.cause]} ({diagnosis.cause})."


def _numbers(numbers: Mapping[str, int | float]) -> str:
    told = [f"{word} {format_bytes(int(numbers[name]))}" for name, word in _BYTES.items() if name in numbers]
    told += [f"{word} {numbers[name]:.3g}" for name, word in _SHARES.items() if name in numbers]
    told += [f"{word} {numbers[name]} tokens" for name, word in _TOKENS.items() if name in numbers]
    if "asked_sequences" in numbers:
        told.append(f"sequences at once {numbers['asked_sequences']}")
    if "timeout_seconds" in numbers:
        told.append(f"waited {numbers['timeout_seconds']:g} s")
    return ", ".join(told)


def _advised(advice: Advice) -> str:
    change = "; ".join(f"{name}: {direction}" for name, direction in advice.change.items())
    words = f"{change} ({advice.why})"
    if advice.predicted is None:
        return words
    to = ", ".join(f"{name}={value}" for name, value in advice.predicted["change"].items())
    return f"{words}. Predicted with {to}: {_figures(advice.predicted)}{_speed(advice.predicted)}"


def _figures(figures: Mapping[str, Any]) -> str:
    peak = figures["peak_memory_bytes"]
    fits = {True: "fits", False: "does not fit", None: "can't be decided"}[figures["fits"]]
    return f"{fits}, {format_bytes(peak['value'])} ({format_bytes(peak['low'])} to {format_bytes(peak['high'])})"


def _speed(figures: Mapping[str, Any]) -> str:
    if figures["changes_what_is_learned"]:
        return ", changes what is learned"
    return "" if figures["speed_ratio"] is None else f", {figures['speed_ratio']:.2f} times the speed"


def _row(label: str, text: str, width: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=label.ljust(_INDENT), subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )
