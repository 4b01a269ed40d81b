"""Result table, stored row by row with time and machine, so that single rows can be repeated."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.faults.play import Found
from tests.faults.table import FAULTS, PLACES, Fault

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILE = BENCHMARKS / "results" / "faults.json"
PACKAGES = ("optuna", "sqlalchemy", "ray", "psycopg", "torch")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Fault at one place."""

    fault: str
    how: str
    place: str
    runs: int = 0
    survived: int = 0
    lost: int = 0
    """Measurements that a driver reported and the study lacks."""

    orphans: int = 0
    """Processes that were left."""

    median_seconds: float | None = None
    date: str = ""
    where: str = ""
    """The machine, in words."""

    load_average: float | None = None
    """Load of the machine before the row."""

    wrong: tuple[str, ...] = ()
    """Seed by seed what was not as it must be."""

    left_out: str | None = None
    """Reason for a row without runs."""


class Kept(msgspec.Struct, kw_only=True):
    """The file."""

    machine: dict[str, Any]
    rows: list[Row] = msgspec.field(default_factory=list)


class Results:
    """Results so far; written after every row. Without a file only printed."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.rows: list[Row] = []
        """Rows of this run."""
        self._kept = Kept(
            machine=_machine(), rows=_rows_of(file) if file is not None and file.exists() else []
        )

    @property
    def machine_in_words(self) -> str:
        machine = self._kept.machine
        return (
            f"{machine['date']}, {in_words(machine)}, load average {machine['load_average_before']}"
            " before"
        )

    def runs(self, fault: Fault, place: str) -> float:
        """Return the number of runs of this very fault; infinity if there is a reason for none."""
        rows = []
        for row in self._kept.rows:
            if (row.fault, row.place, row.how) == (fault.name, place, fault.how):
                rows.append(row)
        return max(
            (float("inf") if row.left_out is not None else row.runs for row in rows), default=0
        )

    def put(self, row: Row, *, added: bool) -> None:
        """Keep a row in its former one's place, or with the runs of that one."""
        self.rows.append(row)
        row = msgspec.structs.replace(row, where=in_words(self._kept.machine))
        for former in self._kept.rows if added else ():
            if (former.fault, former.place) == (row.fault, row.place):
                row = _together(former, row)
        other_rows = []
        for stored in self._kept.rows:
            if (stored.fault, stored.place) != (row.fault, row.place):
                other_rows.append(stored)
        order = {}
        for number, (place, fault) in enumerate((p, f) for p in PLACES for f in FAULTS):
            order[(fault.name, place)] = number
        listed = [stored for stored in [*other_rows, row] if (stored.fault, stored.place) in order]
        self._kept.rows = sorted(listed, key=lambda stored: order[stored.fault, stored.place])
        if self._file is not None:
            self._file.write_bytes(
                msgspec.json.format(msgspec.json.encode(self._kept), indent=1) + b"\n"
            )
            self._file.with_suffix(".md").write_text(page(self._kept))


def _rows_of(file: Path) -> list[Row]:
    """Assign rows without a place to the place of the file."""
    contents = msgspec.json.decode(file.read_bytes(), type=Kept)
    machine, load = in_words(contents.machine), contents.machine["load_average_before"]
    rows = []
    for row in contents.rows:
        rows.append(
            row if row.where else msgspec.structs.replace(row, where=machine, load_average=load)
        )
    return rows


def row_of(
    fault: Fault,
    place: str,
    runs: Sequence[tuple[int, Found]],
    load_average: float,
) -> Row:
    outcomes = [outcome for _, outcome in runs]
    return Row(
        fault=fault.name,
        how=fault.how,
        place=place,
        runs=len(outcomes),
        survived=sum(outcome.survived for outcome in outcomes),
        lost=sum(outcome.lost for outcome in outcomes),
        orphans=sum(outcome.orphans for outcome in outcomes),
        median_seconds=round(statistics.median(outcome.seconds for outcome in outcomes), 1),
        date=datetime.date.today().isoformat(),
        load_average=round(load_average, 1),
        wrong=tuple(f"seed {seed}: {text}" for seed, outcome in runs for text in outcome.wrong),
    )


def _together(former: Row, row: Row) -> Row:
    runs = {}
    for name in ("runs", "survived", "lost", "orphans", "wrong"):
        runs[name] = getattr(former, name) + getattr(row, name)
    # The mean of both medians, by their runs; the higher load.
    seconds = (
        (former.median_seconds or 0) * former.runs + (row.median_seconds or 0) * row.runs
    ) / runs["runs"]
    load = max(former.load_average or 0, row.load_average or 0)
    return msgspec.structs.replace(row, **runs, median_seconds=round(seconds, 1), load_average=load)


def left_out(
    fault: Fault,
    place: str,
    why: str,
) -> Row:
    return Row(
        fault=fault.name,
        how=fault.how,
        place=place,
        left_out=why,
    )


def line(row: Row) -> str:
    """Format a row for the terminal."""
    if row.left_out is not None:
        return f"{row.fault:26} {row.place:5}  left out: {row.left_out}"
    figures = (
        f"{row.runs:3} runs, {row.survived:3} survived, {row.lost} lost, {row.orphans} orphans,"
        f" {row.median_seconds} s each"
    )
    return "\n  ".join([f"{row.fault:26} {row.place:5} {figures}", *row.wrong])


ABOUT = (Path(__file__).parent / "about.md").read_text()


def page(contents: Kept) -> str:
    """The table for readers."""
    played = [row for row in contents.rows if row.left_out is None]
    nothing = []
    for row in contents.rows:
        if row.left_out is not None:
            nothing.append(f"- {row.fault}, {row.place}: {row.left_out}.")
    wrong = []
    for row in played:
        for text in row.wrong:
            wrong.append(f"- {row.fault}, {row.place}, {text}")
    machines = {}
    for number, machine in enumerate(dict.fromkeys(row.where for row in played), start=1):
        machines[machine] = f"{number}"
    return (
        "\n".join(
            [
                "# Faults, played out",
                "",
                "`make test-faults`, each row on one of these machines:",
                "",
                *(f"{number}. {machine}" for machine, number in machines.items()),
                "",
                ABOUT,
                "",
                (
                    "| fault | how | executor | runs | survived | lost | orphans | each took | at a"
                    " load of | machine | date |"
                ),
                "|---|---|---|---|---|---|---|---|---|---|---|",
                *(
                    f"| {row.fault} | {row.how} | {row.place} | {_figures(row)} |"
                    f" {row.median_seconds} s | {row.load_average} | {machines[row.where]} |"
                    f" {row.date} |"
                    for row in played
                ),
                f"| all | | | {_sums(played)} | | | | |",
                "",
                *(["Did not survive:", "", *wrong, ""] if wrong else []),
                *(["Left out:", "", *nothing] if nothing else []),
            ]
        ).rstrip()
        + "\n"
    )


def _figures(row: Row) -> str:
    return f"{row.runs} | {row.survived} | {row.lost} | {row.orphans}"


def _sums(rows: Sequence[Row]) -> str:
    figures = [(row.runs, row.survived, row.lost, row.orphans) for row in rows]
    return " | ".join(str(sum(column)) for column in zip(*figures, strict=True))


def in_words(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gib = machine["memory_bytes"] / 2**30
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {gib:.0f} GiB, {machine['system']};"
        f" {versions}"
    )


def _machine() -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import machine
    finally:
        sys.path.remove(str(BENCHMARKS))
    installed = [name for name in PACKAGES if importlib.util.find_spec(name)]
    versions = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in installed},
    }
    return {**machine.facts(versions), "load_average_before": round(os.getloadavg()[0], 1)}
