"""`autotune study`: move a study to another machine or another database."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autotune.cli.exits import DONE
from autotune.cli.words import say

_STORAGE = click.option("--storage", required=True, metavar="URL", help="Optuna's storage, like sqlite:///autotune-out/study.db.")
_NAME = click.option("--study", "name", metavar="NAME", help="The study's name; needed only where there are several.")
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(name="study", short_help="move a study: export, import")
def command() -> None:
    """Move a study to another machine, or from one database into another.

    \b
    Example:
      autotune study export --storage sqlite:///autotune-out/study.db study.json
    """


@command.command(name="export")
@click.argument("file", metavar="FILE")
@_STORAGE
@_NAME
@_AS_JSON
def export_study(file: str, storage: str, name: str | None, as_json: bool) -> int:
    """Write a whole study into one JSON file.

    \b
    Example:
      autotune study export --storage sqlite:///autotune-out/study.db study.json
    """
    from autotune.files import write_whole
    from autotune.study.moving import encode, packed

    moved = packed(storage, name)
    write_whole(Path(file), encode(moved), way_out="Name another file.")
    row = {"study": moved.name, "file": file, "trials": len(moved.trials)}
    _say(as_json, row, f"Written: {file} ({len(moved.trials)} trials of study {moved.name!r})")
    return DONE


@command.command(name="import")
@click.argument("file", metavar="FILE")
@_STORAGE
@_NAME
@_AS_JSON
def import_study(file: str, storage: str, name: str | None, as_json: bool) -> int:
    """Make a study out of a file that `export` wrote. `autotune run --resume` then goes on with it.

    \b
    Example:
      autotune study import --storage postgresql://me@db/autotune study.json
    """
    from autotune.study.moving import read, unpack

    moved = read(Path(file))
    chosen = name or moved.name
    unpack(moved, storage, chosen)
    _say(as_json, {"study": chosen, "trials": len(moved.trials)}, f"Study {chosen!r} holds {len(moved.trials)} trials.")
    return DONE


def _say(as_json: bool, row: dict[str, object], words: str) -> None:
    if as_json:
        print(json.dumps({"schema": 1, **row}))
    else:
        say(words)
