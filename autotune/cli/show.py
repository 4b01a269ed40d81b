"""`autotune show`: what is known, without a network and without loading anything heavy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from autotune.units import MIB, format_bytes

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(name="show", short_help="list what is known")
def command() -> None:
    """List what is known: models, GPUs, search spaces, knobs.

    \b
    Example:
      autotune show gpus
    """


@command.command()
@_AS_JSON
def models(as_json: bool) -> None:
    """Models whose shape is known offline.

    \b
    Example:
      autotune show models
    """
    from autotune import catalogue

    rows: list[dict[str, Any]] = [
        {
            "name": known.ids[0].split("/")[1],
            "ids": list(known.ids),
            "parameters_billions": known.parameters_billions,
            "layers": known.config["num_hidden_layers"],
            "hidden": known.config["hidden_size"],
            "source": known.source,
        }
        for known in catalogue.models()
    ]
    shown = [[row["name"], f"{row['parameters_billions']}B", row["layers"], row["hidden"], ", ".join(row["ids"])] for row in rows]
    _show(as_json, "models", rows, ["name", "parameters", "layers", "hidden", "hub id"], shown)
    if not as_json:
        click.echo("\nAny local folder with a config.json works too, and any hub id that is in this machine's hub cache.")


@command.command()
@_AS_JSON
def gpus(as_json: bool) -> None:
    """GPUs whose memory is known, and those of this machine.

    \b
    Example:
      autotune show gpus
    """
    from autotune import catalogue, detect

    rows: list[dict[str, Any]] = [
        {
            "name": gpu.name,
            "memory_bytes": gpu.memory_mib * MIB,
            "seen_by": gpu.seen_by,
            "aliases": list(gpu.aliases),
            "source": gpu.source,
        }
        for gpu in catalogue.gpus()
    ]
    here: list[dict[str, Any]] = [{"name": device.name, "memory_bytes": device.memory_bytes} for device in detect.gpus_here()]
    if as_json:
        document = {"schema": 1, "gpus": rows, "here": here, "cpu_memory_bytes": detect.machine_memory_bytes()}
        click.echo(json.dumps(document, indent=2))
        return
    shown = [[row["name"], format_bytes(row["memory_bytes"]), row["seen_by"], row["source"]] for row in rows]
    _table(["name", "memory", "as seen by", "source"], shown)
    found = ", ".join(f"{device['name']} ({format_bytes(device['memory_bytes'])})" for device in here) or "no NVIDIA GPU"
    click.echo(f"\nHere: {found}; a CPU with {format_bytes(detect.machine_memory_bytes())}, as --gpus cpu or 2xcpu.")


@command.command()
@_AS_JSON
def spaces(as_json: bool) -> None:
    """Search spaces that come with autotune.

    \b
    Example:
      autotune show spaces
    """
    from autotune.spaces import load_space, names

    loaded = [load_space(name) for name in names()]
    rows = [
        {
            "name": space.name,
            "method": space.method,
            "framework": space.framework,
            "objective": space.objective,
            "about": space.about,
        }
        for space in loaded
    ]
    shown = [[space.name, space.method, space.objective, space.about] for space in loaded]
    _show(as_json, "spaces", rows, ["name", "method", "objective", "about"], shown)


@command.command()
@click.option("--space", default="grpo", show_default=True, metavar="NAME|FILE", help="The space whose knobs to list.")
@_AS_JSON
def knobs(space: str, as_json: bool) -> None:
    """Knobs of a search space, their choices, and what moving them changes.

    \b
    Example:
      autotune show knobs --space grpo-wide
    """
    from autotune.spaces import load_space

    rows: list[dict[str, Any]] = [
        {
            "name": knob.name,
            "choices": list(knob.choices),
            "effect": knob.effect,
            "memory": knob.memory,
            "when": {name: list(values) for name, values in knob.when.items()},
            "says": knob.says,
        }
        for knob in load_space(space).knobs
    ]
    shown = [
        [row["name"], ", ".join(json.dumps(choice) for choice in row["choices"]), row["effect"], row["says"]] for row in rows
    ]
    _show(as_json, "knobs", rows, ["knob", "choices", "effect", "what it does"], shown)


def _show(as_json: bool, what: str, rows: list[dict[str, Any]], columns: list[str], shown: list[list[Any]]) -> None:
    if as_json:
        click.echo(json.dumps({"schema": 1, what: rows}, indent=2))
    else:
        _table(columns, shown)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns aligned by spaces: rich would take longer to import than all the rest of this command."""
    cells = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        click.echo("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
