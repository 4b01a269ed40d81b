"""`autotune diagnose`: what failed first in a training log, and what helps; or what is known to go wrong in an environment."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, UNDECIDED
from autotune.cli.signals import interruptible
from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.diagnose import Diagnosis
    from autotune.failures import Sprung


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
        diagnosis = None if log is None else _diagnosed(log, config, gpus, python)
        sprung = _checked(python) if check else None
    click.echo(json.dumps(_document(diagnosis, sprung)) if as_json else _words(diagnosis, sprung))
    return DONE if diagnosis is None or diagnosis.known else UNDECIDED


def _diagnosed(log: str, config: str | None, gpus: str | None, python: str | None) -> Diagnosis:
    from autotune.api import diagnose
    from autotune.diagnose.files import lines_of_file, lines_of_stream

    lines = lines_of_stream(sys.stdin.buffer, "Standard input") if log == "-" else lines_of_file(log)
    return diagnose(lines, config=config, gpus=gpus or "local", python=python)


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
