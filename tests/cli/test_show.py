"""`autotune show` as text and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.catalog import gpus, models
from tests.cli.command import autotune
from tests.cli.pseudo_terminal import lines, terminal_output


@pytest.mark.parametrize(
    ("kind", "columns", "side_by_side", "below"),
    [
        ("gpus", 60, ["name", "memory", "GB/s", "bf16 TFLOPS"], "seen by: "),
        ("gpus", 20, ["name", "memory", "GB/s", "bf16 TFLOPS"], "seen by: "),
        ("gpus", 300, ["link GB/s", "compute", "seen by", "source"], None),
        ("models", 72, ["name", "parameters", "layers", "context"], "hub ids: "),
        ("models", 300, ["context", "hidden", "vocabulary", "hub ids"], None),
    ],
)
def test_a_table_fits_the_terminal_and_loses_nothing(
    kind: str,
    columns: int,
    side_by_side: list[str],
    below: str | None,
    tmp_path: Path,
) -> None:
    table = (
        "\n".join(lines(terminal_output("show", kind, cwd=tmp_path, columns=columns)))
        .split("\n\n")[0]
        .splitlines()
    )
    assert all(len(line) <= max(60, columns) for line in table)
    places = [table[0].index(column) for column in side_by_side]
    assert places == sorted(places)
    entries = len(gpus()) if kind == "gpus" else len(models())
    assert len([line for line in table if not line.startswith("    ")]) == 1 + entries
    assert below is None or "\n".join(table).count(below.strip()) == entries


def test_one_gpus_row(tmp_path: Path) -> None:
    rows = [line.split() for line in autotune("show", "gpus", cwd=tmp_path).out.splitlines()]
    assert next(row for row in rows if row[:1] == ["A100-40G"])[:7] == [
        "A100-40G",
        "40",
        "GiB",
        "1555",
        "312",
        "nvlink",
        "300",
    ]
    assert next(row for row in rows if row[:1] == ["T4"])[:7] == [
        "T4",
        "15",
        "GiB",
        "320",
        "-",
        "pcie",
        "16",
    ]


def test_unsupported_gpus_are_marked(tmp_path: Path) -> None:
    shown = autotune("show", "gpus", cwd=tmp_path).out.splitlines()
    assert [line.split()[0] for line in shown if "no probes" in line] == [
        "MI300X",
        "MI325X",
        "MI355X",
    ]


def test_documents_are_complete(tmp_path: Path) -> None:
    of_gpus = autotune("show", "gpus", "--json", cwd=tmp_path).document["gpus"]
    assert [row["name"] for row in of_gpus] == [gpu.name for gpu in gpus()]
    assert all(row["source"] and row["memory_bytes"] for row in of_gpus)
    assert all(row["tflops"] for row in of_gpus if row.get("speed_source"))
    of_models = autotune("show", "models", "--json", cwd=tmp_path).document["models"]
    assert [row["ids"] for row in of_models] == [list(model.ids) for model in models()]
    assert all(
        row["source"] and row["page"] and row["config"] and row["layers"] and row["context"]
        for row in of_models
    )
