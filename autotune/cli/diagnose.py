"""`autotune diagnose`: what failed first in a training log, and what helps; or what is known to go wrong in an environment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from autotune.cli.exits import DONE, UNDECIDED
from autotune.cli.signals import interruptible
from autotune.errors import BadInput
from autotune.units import GIB, format_bytes

if TYPE_CHECKING:
    from autotune.diagnose import Diagnosis
    from autotune.failures import Sprung

LARGEST_BYTES = 4 * GIB
"""A larger file takes minutes to read, and its end tells what ended it."""

_HEAD_BYTES = 2**16
_MAGIC = {
    b"\x1f\x8b": "gzip -dc",
    b"BZh": "bzip2 -dc",
    b"\xfd7zXZ": "xz -dc",
    b"(\xb5/\xfd": "zstd -dc",
    b"PK\x03\x04": "unzip -p",
}
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\x08\x1b\x0c")
_MOST_CONTROL = 0.1


@click.command(name="diagnose", short_help="what failed first in a log")
@click.argument("log", metavar="LOG|-", required=False)
@click.option(
    "--config", metavar="FILE", help="The YAML of `trl grpo --config` that failed: remedies get their predicted effect."
)
@click.option("--gpus", metavar="HARDWARE", help="With --config: where it ran, as in 2xA100-40G. This machine's GPUs otherwise.")
@click.option("--check", is_flag=True, help="Look at installed versions and variables for known traps; LOG may be left out.")
@click.option("--python", metavar="PATH", help="The training environment's interpreter; autotune's own otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(log: str | None, config: str | None, gpus: str | None, check: bool, python: str | None, as_json: bool) -> int:
    """Read a training log, a file or - for standard input, and say what failed first, on which rank and in
    which phase, whether memory ran out and which, and what helps.

    Exit codes: 0 for a known failure, a training that finished or a check; 5 when the log holds no failure that is known.

    \b
    Examples:
      autotune diagnose train.log
      torchrun --nproc_per_node 2 train.py 2>&1 | tee train.log | autotune diagnose -
      autotune diagnose train.log --config train.yaml --gpus 2xA100-40G
      autotune diagnose --check --python .venv/bin/python
    """
    if log is None and not check:
        raise BadInput("No log was named.", way_out="Name a log file, or - for standard input; or --check the environment alone.")
    if gpus is not None and config is None:
        raise BadInput("--gpus says where a configuration ran, and none was given.", way_out="Give it with --config FILE.")
    if log is None and config is not None:
        raise BadInput("--config is about a log, and none was named.", way_out="Name the log that this configuration left.")
    with interruptible():
        diagnosis = None if log is None else _diagnosed(log)
        if diagnosis is not None and config is not None:
            diagnosis = _with_effects(diagnosis, config, gpus, python)
        sprung = _checked(python) if check else None
    click.echo(json.dumps(_document(diagnosis, sprung)) if as_json else _words(diagnosis, sprung))
    return DONE if diagnosis is None or diagnosis.known else UNDECIDED


def _diagnosed(log: str) -> Diagnosis:
    from autotune.diagnose import diagnose_lines
    from autotune.failures import lines_of

    with _opened(log) as stream:
        head = stream.read(_HEAD_BYTES)
        _refuse_what_is_no_text(log, head)
        diagnosis = diagnose_lines(lines_of(_Joined(head, stream)))
    if not diagnosis.evidence:
        raise _empty(log)
    return diagnosis


def _with_effects(diagnosis: Diagnosis, config: str, gpus: str | None, python: str | None) -> Diagnosis:
    """Each remedy with what it would do to this configuration; one that can't be predicted says so, and the rest stands."""
    from autotune import detect
    from autotune.asking import candidate_in_question, understand
    from autotune.diagnose.effects import Effects
    from autotune.flags import Flags
    from autotune.foresight import open_foresight

    if gpus is None and detect.hardware("local").kind != "cuda":
        raise BadInput(
            "--config is predicted for GPUs, and this machine has none.", way_out="Say where it ran: --gpus 2xA100-40G"
        )
    if not Path(config).is_file():
        raise BadInput(f"--config {config} is no file.", way_out="Name the YAML file that was given to `trl grpo --config`.")
    try:
        understood = understand(Flags(config=config, gpus=gpus or "local", python=python, mode="predict"))
        question, trainer = understood.question, understood.trainer
        candidate = candidate_in_question(understood)
        with contextlib.closing(open_foresight(question, trainer)) as foresight:
            effects = Effects(
                question=question, space=understood.whole_space, trainer=trainer, foresight=foresight, candidate=candidate
            )
            return effects.on(diagnosis)
    except BadInput as error:
        why = f"nothing could be predicted for {config}: {error}"
        return dataclasses.replace(diagnosis, remarks=(*diagnosis.remarks, why))


def _checked(python: str | None) -> tuple[Sprung, ...]:
    from autotune import environment
    from autotune.diagnose.surroundings import surroundings_of
    from autotune.failures import sprung_in

    return sprung_in(surroundings_of(environment.interpreter(python)))


def _document(diagnosis: Diagnosis | None, sprung: tuple[Sprung, ...] | None) -> dict[str, Any]:
    from autotune.diagnose import SCHEMA, as_document

    document = {"schema": SCHEMA} if diagnosis is None else as_document(diagnosis)
    return document if sprung is None else {**document, "traps": [dataclasses.asdict(trap) for trap in sprung]}


def _words(diagnosis: Diagnosis | None, sprung: tuple[Sprung, ...] | None) -> str:
    from autotune.diagnose.words import check_in_words, in_words

    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    told = [] if diagnosis is None else [in_words(diagnosis, width)]
    return "\n".join(told if sprung is None else [*told, check_in_words(sprung, width)])


@contextlib.contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        yield sys.stdin.buffer
        return
    _refuse_what_is_no_file(log)
    try:
        with Path(log).open("rb") as stream:
            yield stream
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{log!r} can't be read: {reason}.", way_out="Name a log file, or - to read standard input.") from error


def _refuse_what_is_no_file(log: str) -> None:
    path = Path(log)
    try:
        is_folder, size = path.is_dir(), path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError):
        return
    if is_folder:
        raise BadInput(
            f"{log!r} is a folder, and a log is a file.",
            way_out=f"Name one file in it, or read all of them: cat {log.rstrip('/')}/*.log | autotune diagnose -",
        )
    if size > LARGEST_BYTES:
        raise BadInput(
            f"{log!r} has {format_bytes(size)}, and files of up to {format_bytes(LARGEST_BYTES)} are read.",
            way_out=f"Read its end: tail -c 500M {log} | autotune diagnose -",
        )


def _refuse_what_is_no_text(log: str, head: bytes) -> None:
    name = "Standard input" if log == "-" else repr(log)
    program = next((program for magic, program in _MAGIC.items() if head.startswith(magic)), None)
    if program is not None:
        raise BadInput(f"{name} is compressed, and a log is text.", way_out=f"Unpack it: {program} {log} | autotune diagnose -")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInput(
            f"{name} is text in UTF-16, and logs are read as UTF-8.",
            way_out=f"Convert it: iconv -f UTF-16 -t UTF-8 {log} | autotune diagnose -",
        )
    control = len(head) - len(head.translate(None, _CONTROL))
    if control > _MOST_CONTROL * max(len(head), 1):
        raise BadInput(
            f"{name} is binary: {control} of its first {len(head)} bytes are no text.",
            way_out="Name the file that holds what the training printed.",
        )


def _empty(log: str) -> BadInput:
    name = "Standard input" if log == "-" else repr(log)
    return BadInput(
        f"{name} holds no text.", way_out="Errors go to standard error: collect both, as in `python train.py > train.log 2>&1`."
    )


class _Joined:
    """What was read to look at it, and then the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int, /) -> bytes:
        head, self._head = self._head, b""
        return head or self._rest.read(size)
