"""`autotune diagnose`: first failure in a log, with remedies; traps of an environment."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import click

from autotune.cli.exit_codes import DONE, UNDECIDED, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.core.errors import BadInput


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
    diagnosis, active = None, None
    with interruptible():
        if log is not None:
            from autotune.api import diagnose
            from autotune.diagnosis.log_files import lines_of_file, lines_of_stream

            lines = (
                lines_of_stream(sys.stdin.buffer, "Standard input")
                if log == "-"
                else lines_of_file(log)
            )
            diagnosis = diagnose(lines, config=config, gpus=gpus or "local", python=python)
        if check:
            from autotune.failures.environment_traps import active_traps, environment_facts
            from autotune.machine import environment

            active = active_traps(environment_facts(environment.interpreter(python)))
    if as_json:
        from autotune.diagnosis import SCHEMA, as_document

        document = {"schema": SCHEMA} if diagnosis is None else as_document(diagnosis)
        traps = {} if active is None else {"traps": [dataclasses.asdict(trap) for trap in active]}
        click.echo(json.dumps({**document, **traps}))
    else:
        from autotune.diagnosis.diagnosis import check_in_words, in_words

        width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
        texts = [] if diagnosis is None else [in_words(diagnosis, width)]
        click.echo("\n".join(texts if active is None else [*texts, check_in_words(active, width)]))
    return DONE if diagnosis is None or diagnosis.known else UNDECIDED
