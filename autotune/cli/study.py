"""`autotune study`: export and import of studies."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autotune.cli.exit_codes import DONE
from autotune.cli.options import as_json_option, storage_options
from autotune.cli.output import say
from autotune.core.units import counted

_STORAGE = storage_options(
    "Optuna storage. Example: sqlite:///autotune-out/study.db.", required=True
)
_NAME = click.option(
    "--study", "name", metavar="NAME", help="Name of the study. Needed if the storage has several."
)
_AS_JSON = as_json_option("Print one JSON document.")


@click.group(name="study", short_help="export a study into a file, or import it")
def command() -> None:
    """Move a study to another machine or database.

    \b
    Example:
      autotune study export --storage sqlite:///autotune-out/study.db study.json
    """


@command.command(name="export")
@click.argument("file", metavar="FILE")
@_STORAGE
@_NAME
@_AS_JSON
def export_study(
    file: str,
    storage: str,
    name: str | None,
    as_json: bool,
) -> int:
    """Write a whole study into one JSON file.

    \b
    Example:
      autotune study export --storage sqlite:///autotune-out/study.db study.json
    """
    from autotune.core.files import write_output
    from autotune.search.study_export import encode, packed

    study = packed(storage, name)
    write_output(Path(file), encode(study), way_out="Name another file.")
    row = {"study": study.name, "file": file, "trials": len(study.trials)}
    trials = counted(len(study.trials), "trial")
    _say(as_json, row, f"Written: {file} ({trials} of study {study.name!r})")
    return DONE


@command.command(name="import")
@click.argument("file", metavar="FILE")
@_STORAGE
@_NAME
@_AS_JSON
def import_study(
    file: str,
    storage: str,
    name: str | None,
    as_json: bool,
) -> int:
    """Create a study from a file of `export`. `autotune run --resume` continues it.

    \b
    Example:
      autotune study import --storage postgresql://me@db/autotune study.json
    """
    from autotune.search.study_export import read, unpack

    study = read(Path(file))
    new_name = name or study.name
    unpack(study, storage, new_name)
    row = {"study": new_name, "trials": len(study.trials)}
    _say(as_json, row, f"Study {new_name!r} holds {counted(len(study.trials), 'trial')}.")
    return DONE


def _say(
    as_json: bool,
    row: dict[str, object],
    text: str,
) -> None:
    if as_json:
        print(json.dumps({"schema": 1, **row}))
    else:
        say(text)
