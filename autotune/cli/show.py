"""`autotune show`: the catalogue, without a network and without heavy imports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import as_json_option
from autotune.cli.output import say, table
from autotune.core.units import format_bytes

if TYPE_CHECKING:
    from autotune.catalog import Gpu
    from autotune.core.space import Knob

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
        model_shape = shape(model.config)
        rows.append(
            {
                "name": model.ids[0].split("/")[1],
                **msgspec.to_builtins(model),
                "layers": len(model_shape.layers),
                "hidden": model_shape.hidden,
                "vocabulary": model_shape.vocabulary,
                "context": model_shape.positions,
            }
        )
    columns = ["name", "parameters", "layers", "context", "hidden", "vocabulary", "hub ids"]
    shown = []
    for row in sorted(rows, key=lambda row: str(row["name"]).lower()):
        widths = [row[name] for name in columns[2:-1]]
        parameters = f"{row['parameters_billions']:g}B"
        shown.append([row["name"], parameters, *widths, ", ".join(row["ids"])])
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

    devices = hardware_detection.gpus_here()
    if as_json:
        rows = []
        for gpu in catalog.gpus():
            rows.append({**msgspec.to_builtins(gpu), "memory_bytes": gpu.memory_bytes})
        document = {
            "schema": 1,
            "gpus": rows,
            "here": [msgspec.to_builtins(device) for device in devices],
            "cpu_memory_bytes": machine_memory_bytes(),
        }
        click.echo(json.dumps(document, indent=2))
        return

    columns = ["name", "memory", "GB/s", "bf16 TFLOPS", "link GB/s", "compute", "seen by", "source"]
    table(columns, [_gpu_cells(gpu) for gpu in catalog.gpus()])
    present = [f"{device.name} ({format_bytes(device.memory_bytes)})" for device in devices]
    gpus_here = ", ".join(present) or "no NVIDIA GPU"
    cpu = format_bytes(machine_memory_bytes())
    say("\nDense peaks, and one direction of a link. --json adds the other dtypes and all sources.")
    say(f"Here: {gpus_here}; a CPU with {cpu}, as --gpus cpu or 2xcpu.")


def _gpu_cells(gpu: Gpu) -> list[str]:
    link = (gpu.link or "-").removeprefix("infinity-")
    return [
        gpu.name,
        format_bytes(gpu.memory_bytes),
        _figure(gpu.bandwidth_gb_per_second),
        _figure(gpu.tflops.get("bfloat16")),
        f"{link} {_figure(gpu.link_gb_per_second)}",
        gpu.compute_capability or "-",
        gpu.seen_by if gpu.probes else "no probes",
        gpu.source,
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


@command.command()
@_AS_JSON
def spaces(as_json: bool) -> None:
    """List the search spaces that come with autotune.

    \b
    Example:
      autotune show spaces
    """
    from autotune.catalog.space_files import load_space, names

    rows = []
    for name in names():
        space = load_space(name)
        rows.append(
            {
                "name": space.name,
                "method": space.method,
                "framework": space.framework,
                "objective": space.objective,
                "about": space.about,
            }
        )
    columns = ["name", "method", "objective", "about"]
    shown = [[row[column] for column in columns] for row in rows]
    _show(as_json, "spaces", rows, columns, shown)


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

    search_space = load_space(space)
    rows = [_knob_row(knob, is_searched=True) for knob in search_space.knobs]
    rows += [_knob_row(knob, is_searched=False) for knob in search_space.remedies]
    shown = []
    for row in rows:
        choices = ", ".join(map(json.dumps, row["choices"]))
        shown.append([row["name"], choices, row["effect"], _offered(row), row["says"]])
    _show(as_json, "knobs", rows, ["knob", "choices", "effect", "moves", "what it does"], shown)


def _knob_row(knob: Knob, *, is_searched: bool) -> dict[str, Any]:
    return {
        "name": knob.name,
        "choices": list(knob.choices),
        "effect": knob.effect,
        "memory": knob.memory,
        "when": {name: list(values) for name, values in knob.when.items()},
        "from_gpus": knob.from_gpus,
        "searched": is_searched,
        "says": knob.says,
    }


def _offered(row: dict[str, Any]) -> str:
    """Return `searched`, `held` or `on request`, with the minimum number of GPUs."""
    text = "on request"
    if row["searched"]:
        text = "searched" if len(row["choices"]) > 1 else "held"
    if row["from_gpus"] > 1:
        return f"{text}, from {row['from_gpus']} GPUs"
    return f"{text}, GPUs" if row["from_gpus"] else text


def _show(
    as_json: bool,
    kind: str,
    rows: list[dict[str, Any]],
    columns: list[str],
    shown: list[list[Any]],
) -> None:
    if as_json:
        click.echo(json.dumps({"schema": 1, kind: rows}, indent=2))
    else:
        table(columns, shown)
