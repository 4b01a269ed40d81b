"""`autotune show`: the catalogue, without a network and without heavy imports."""

from __future__ import annotations

import json
from typing import Any

import click

from autotune.cli.options import as_json_option
from autotune.cli.output import say, table
from autotune.core.units import format_bytes

_AS_JSON = as_json_option("Print one JSON document.")


@click.group(name="show", short_help="list the known models, GPUs, search spaces and knobs")
def command() -> None:
    """List the known models, GPUs, search spaces or knobs.

    \b
    Example:
      autotune show gpus
    """


@command.command()
@_AS_JSON
def models(as_json: bool) -> None:
    """List models with a known shape.

    \b
    Example:
      autotune show models
    """
    import msgspec

    from autotune import catalog
    from autotune.estimate.model_shape import shape

    rows: list[dict[str, Any]] = []
    for model in catalog.models():
        own, about = (
            shape(model.config),
            {"name": model.ids[0].split("/")[1], **msgspec.to_builtins(model)},
        )
        widths = {
            "layers": len(own.layers),
            "hidden": own.hidden,
            "vocabulary": own.vocabulary,
            "context": own.positions,
        }
        rows.append({**about, **widths})
    columns = ["name", "parameters", "layers", "context", "hidden", "vocabulary", "hub ids"]
    shown = [
        [
            one["name"],
            f"{one['parameters_billions']:g}B",
            *(one[name] for name in columns[2:-1]),
            ", ".join(one["ids"]),
        ]
        for one in sorted(rows, key=lambda row: str(row["name"]).lower())
    ]
    _show(as_json, "models", rows, columns, shown)
    if not as_json:
        say(
            "\nAny local folder with a config.json works too, and any hub id that is in this"
            " machine's hub cache."
        )
        say("--json adds each shape and its public source.")


@command.command()
@_AS_JSON
def gpus(as_json: bool) -> None:
    """List GPUs with a known memory size, and those of this machine.

    \b
    Example:
      autotune show gpus
    """
    import msgspec

    from autotune import catalog
    from autotune.machine import hardware_detection
    from autotune.machine.host_memory import machine_memory_bytes

    known = catalog.gpus()
    rows: list[dict[str, Any]] = [
        {**msgspec.to_builtins(gpu), "memory_bytes": gpu.memory_bytes} for gpu in known
    ]
    here: list[dict[str, Any]] = [
        msgspec.to_builtins(device) for device in hardware_detection.gpus_here()
    ]
    if as_json:
        document = {
            "schema": 1,
            "gpus": rows,
            "here": here,
            "cpu_memory_bytes": machine_memory_bytes(),
        }
        click.echo(json.dumps(document, indent=2))
        return

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    shown = [
        (
            gpu.name,
            format_bytes(gpu.memory_bytes),
            figure(gpu.bandwidth_gb_per_second),
            figure(gpu.tflops.get("bfloat16")),
            f"{(gpu.link or '-').removeprefix('infinity-')} {figure(gpu.link_gb_per_second)}",
            gpu.compute_capability or "-",
            gpu.seen_by if gpu.probes else "no probes",
            gpu.source,
        )
        for gpu in known
    ]
    table(
        ["name", "memory", "GB/s", "bf16 TFLOPS", "link GB/s", "compute", "seen by", "source"],
        shown,
    )
    found = (
        ", ".join(f"{device['name']} ({format_bytes(device['memory_bytes'])})" for device in here)
        or "no NVIDIA GPU"
    )
    say("\nDense peaks, and one direction of a link. --json adds the other dtypes and all sources.")
    say(
        f"Here: {found}; a CPU with {format_bytes(machine_memory_bytes())}, as --gpus cpu or 2xcpu."
    )


@command.command()
@_AS_JSON
def spaces(as_json: bool) -> None:
    """List the search spaces that come with autotune.

    \b
    Example:
      autotune show spaces
    """
    from autotune.catalog.space_files import load_space, names

    loaded = [load_space(name) for name in names()]
    names_of = ("name", "method", "framework", "objective", "about")
    rows = [{name: getattr(space, name) for name in names_of} for space in loaded]
    columns = ["name", "method", "objective", "about"]
    _show(as_json, "spaces", rows, columns, [[row[name] for name in columns] for row in rows])


@command.command()
@click.option(
    "--space",
    default="grpo",
    show_default=True,
    metavar="NAME|FILE",
    help="Shipped search space, or a YAML file.",
)
@_AS_JSON
def knobs(space: str, as_json: bool) -> None:
    """List the knobs of a search space with their choices and effects.

    \b
    Example:
      autotune show knobs --space grpo-wide
    """
    from autotune.catalog.space_files import load_space

    loaded = load_space(space)
    rows: list[dict[str, Any]] = [
        {
            "name": knob.name,
            "choices": list(knob.choices),
            "effect": knob.effect,
            "memory": knob.memory,
            "when": {name: list(values) for name, values in knob.when.items()},
            "from_gpus": knob.from_gpus,
            "searched": searched,
            "says": knob.says,
        }
        for searched, listed in ((True, loaded.knobs), (False, loaded.remedies))
        for knob in listed
    ]
    shown = [
        [
            row["name"],
            ", ".join(json.dumps(choice) for choice in row["choices"]),
            row["effect"],
            _offered(row),
            row["says"],
        ]
        for row in rows
    ]
    _show(as_json, "knobs", rows, ["knob", "choices", "effect", "moves", "what it does"], shown)


def _offered(row: dict[str, Any]) -> str:
    """Return `searched`, `held` or `on request`, with the minimum number of GPUs."""
    words = (
        "on request" if not row["searched"] else "searched" if len(row["choices"]) > 1 else "held"
    )
    return (
        f"{words}, from {row['from_gpus']} GPUs"
        if row["from_gpus"] > 1
        else f"{words}, GPUs"
        if row["from_gpus"]
        else words
    )


def _show(
    as_json: bool, what: str, rows: list[dict[str, Any]], columns: list[str], shown: list[list[Any]]
) -> None:
    if as_json:
        click.echo(json.dumps({"schema": 1, what: rows}, indent=2))
    else:
        table(columns, shown)
