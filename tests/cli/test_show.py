"""What is known, as a person reads it and as a program does."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.catalogue import gpus, models
from tests.cli.command import autotune


@pytest.mark.parametrize(
    ("what", "columns", "needed"),
    [
        ("gpus", 60, ["name", "memory", "GB/s", "bf16 TFLOPS", "link GB/s"]),
        ("gpus", 20, ["name", "memory", "GB/s", "bf16 TFLOPS", "link GB/s"]),
        ("gpus", 200, ["link GB/s", "compute", "seen by", "source"]),
        ("models", 60, ["name", "parameters", "layers", "context"]),
        ("models", 300, ["context", "hidden", "vocabulary", "hub ids"]),
    ],
)
def test_a_table_fits_the_terminal_and_keeps_what_matters(what: str, columns: int, needed: list[str], tmp_path: Path) -> None:
    table = autotune("show", what, cwd=tmp_path, COLUMNS=str(columns)).out.split("\n\n")[0].splitlines()
    assert all(len(line) <= max(60, columns) for line in table)
    places = [table[0].index(column) for column in needed]
    assert places == sorted(places)
    assert len(table) == 1 + (len(gpus()) if what == "gpus" else len(models()))


def test_one_gpus_row(tmp_path: Path) -> None:
    lines = autotune("show", "gpus", cwd=tmp_path, COLUMNS="60").out.splitlines()
    assert "A100-40G       40 GiB    1555   312          nvlink 300" in lines
    assert next(line for line in lines if line.startswith("T4 ")).split() == ["T4", "15", "GiB", "320", "-", "pcie", "16"]


def test_what_cannot_be_probed_says_so(tmp_path: Path) -> None:
    lines = autotune("show", "gpus", cwd=tmp_path, COLUMNS="200").out.splitlines()
    assert [line.split()[0] for line in lines if "no probes" in line] == ["MI300X"]


def test_documents_are_complete(tmp_path: Path) -> None:
    of_gpus = autotune("show", "gpus", "--json", cwd=tmp_path).document["gpus"]
    assert [row["name"] for row in of_gpus] == [gpu.name for gpu in gpus()]
    assert all(row["source"] and row["speed_source"] and row["tflops"] and row["memory_bytes"] for row in of_gpus)
    of_models = autotune("show", "models", "--json", cwd=tmp_path).document["models"]
    assert [row["ids"] for row in of_models] == [list(known.ids) for known in models()]
    assert all(row["source"] and row["page"] and row["config"] and row["layers"] and row["context"] for row in of_models)
