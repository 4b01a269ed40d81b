"""`autotune diagnose`: first failure in a log, with remedies; traps of an environment."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import DONE, UNDECIDED, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.cli.output import text_columns
from autotune.cli.waiting import Waiting
from autotune.core.errors import BadInput

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis
    from autotune.failures.environment_traps import ActiveTrap


@click.command(name="diagnose", short_help="find the first failure in a training log")
@click.argument("log", metavar="LOG|-", required=False)
@declared_option(
    "config",
    help="The failed YAML file of `trl grpo --config`: remedies get their predicted effect.",
)
@declared_option(
    "gpus",
    default=None,
    show_default=False,
    help="With --config: GPUs of the failed run. Default: this machine's. Example: 2xA100-40G.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check versions and environment variables for known traps. LOG is optional then.",
)
@declared_option("python")
@as_json_option("Print one JSON document on stdout.")
def command(
    log: str | None,
    config: str | None,
    gpus: str | None,
    check: bool,
    python: str | None,
    as_json: bool,
) -> int:
    """Read a training log (a file, or - for standard input) and report the first failure with its
    rank and phase, the kind of memory that ran out, and remedies.

    Exit codes: 0 for a known failure, a finished training or a check; 5 for a log without a known
    failure.

    \b
    Examples:
      autotune diagnose train.log
      torchrun --nproc_per_node 2 train.py 2>&1 | tee train.log | autotune diagnose -
      autotune diagnose train.log --config train.yaml --gpus 2xA100-40G
      autotune diagnose --check --python .venv/bin/python

    """
    if log is None and not check:
        raise BadInput(
            "No log was named.",
            way_out="Name a log file, or - for standard input; or --check the environment alone.",
        )
    if gpus is not None and config is None:
        raise BadInput(
            "--gpus needs a configuration, and none was given.",
            way_out="Give it with --config FILE.",
        )
    if log is None and config is not None:
        raise BadInput(
            "--config is about a log, and none was named.",
            way_out="Name the log that this configuration left.",
        )
    diagnosis = None
    traps = None
    with interruptible():
        if log == "-":  # read while the training writes it
            diagnosis = _diagnosis(log, config, gpus, python)
        elif log is not None:
            with Waiting("reading the log"):
                diagnosis = _diagnosis(log, config, gpus, python)
        if check:
            traps = _traps(python)
    click.echo(_json(diagnosis, traps) if as_json else _text(diagnosis, traps))
    return DONE if diagnosis is None or diagnosis.known else UNDECIDED


def _diagnosis(
    log: str,
    config: str | None,
    gpus: str | None,
    python: str | None,
) -> Diagnosis:
    from autotune.api.diagnoses import diagnose
    from autotune.diagnosis.log_files import lines_of_file, lines_of_stream

    lines = (
        lines_of_stream(sys.stdin.buffer, "Standard input") if log == "-" else lines_of_file(log)
    )
    return diagnose(
        lines,
        config=config,
        gpus=gpus or "local",
        python=python,
    )


def _traps(python: str | None) -> Sequence[ActiveTrap]:
    from autotune.failures.environment_traps import active_traps, environment_facts
    from autotune.machine import environment

    return active_traps(environment_facts(environment.interpreter(python)))


def _json(diagnosis: Diagnosis | None, traps: Sequence[ActiveTrap] | None) -> str:
    from autotune.diagnosis import SCHEMA, as_document

    document: dict[str, Any] = {"schema": SCHEMA}
    if diagnosis is not None:
        document = as_document(diagnosis)
    if traps is not None:
        document["traps"] = [dataclasses.asdict(trap) for trap in traps]
    return json.dumps(document)


def _text(diagnosis: Diagnosis | None, traps: Sequence[ActiveTrap] | None) -> str:
    from autotune.diagnosis.diagnosis import check_in_words, in_words

    columns = text_columns()
    texts = []
    if diagnosis is not None:
        texts.append(in_words(diagnosis, columns))
    if traps is not None:
        texts.append(check_in_words(traps, columns))
    return "\n".join(texts)
