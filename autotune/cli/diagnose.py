"""`autotune diagnose`: what failed first in a training log, and what helps."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from autotune.cli.exits import DONE, UNDECIDED
from autotune.errors import BadInput
from autotune.units import format_bytes

if TYPE_CHECKING:
    from autotune.diagnose import Diagnosis

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
    "version": "a package is missing, or does not go with another",
    "data": "the data set",
    "disk_or_permission": "the disk: full, or not to be written",
    "network": "the network",
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
_NUMBERS = {"asked_bytes": "asked", "free_bytes": "free", "total_bytes": "of"}
_INDENT = 10


@click.command(name="diagnose", short_help="what failed first in a log")
@click.argument("log", metavar="LOG|-")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(log: str, as_json: bool) -> int:
    """Read a training log, a file or - for standard input, and say what failed first, on which rank and in
    which phase, whether memory ran out and which, and what helps.

    Exit codes: 0 for a known failure or a training that finished, 5 when the log holds no failure that is known.

    \b
    Examples:
      autotune diagnose train.log
      torchrun --nproc_per_node 2 train.py 2>&1 | tee train.log | autotune diagnose -
    """
    from autotune.diagnose import as_document, diagnose_lines
    from autotune.failures import lines_of

    with _opened(log) as stream:
        diagnosis = diagnose_lines(lines_of(stream))
    if not diagnosis.evidence:
        raise _empty(log)
    click.echo(json.dumps(as_document(diagnosis)) if as_json else _in_words(diagnosis))
    return DONE if diagnosis.known else UNDECIDED


@contextlib.contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(log).open("rb") as stream:
            yield stream
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{log!r} can't be read: {reason}.", way_out="Name a log file, or - to read standard input.") from error


def _empty(log: str) -> BadInput:
    name = "Standard input" if log == "-" else repr(log)
    return BadInput(
        f"{name} holds no text.", way_out="Errors go to standard error: collect both, as in `python train.py > train.log 2>&1`."
    )


def _in_words(diagnosis: Diagnosis) -> str:
    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    lines = [_row("result", _verdict(diagnosis), width), _row("line", diagnosis.evidence, width)]
    if diagnosis.numbers:
        lines.append(_row("numbers", _numbers(diagnosis), width))
    for position, advice in enumerate(diagnosis.remedies):
        change = "; ".join(f"{name}: {direction}" for name, direction in advice.change.items())
        lines.append(_row("" if position else "try", f"{change} ({advice.why})", width))
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


def _numbers(diagnosis: Diagnosis) -> str:
    told = [f"{word} {format_bytes(diagnosis.numbers[name])}" for name, word in _NUMBERS.items() if name in diagnosis.numbers]
    if "longest_length" in diagnosis.numbers:
        told.append(f"longest length {diagnosis.numbers['longest_length']} tokens")
    return ", ".join(told)


def _row(label: str, text: str, width: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=label.ljust(_INDENT), subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )
