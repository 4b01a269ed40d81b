"""The result: a file with every mutant, and a page that says the same."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

REASONS = Path(__file__).with_name("survivors.yaml")
BAR = 0.85
NOTICED = ("noticed", "too slow")
PACKAGES = ("pytest", "torch", "transformers", "trl", "optuna", "numpy")

TEXT = """\
# Mutants

{number} small wrong changes of the code, chosen with seed {seed} from {sites} possible ones
(`make mutants`); {judged} of them are judged. First reading: {first} were noticed by a fast test.
Second reading: {second}. The bar is {bar:.0%} of at least 300: {met}. The second reading tries the
mutants of the first again, with the tests that were added for its survivors, and further ones: of
those that nobody had looked at, {further} were noticed at once. Of a run that has not ended, the
shares are those of the mutants judged so far.

Date {date}; {machine}; Python {python}; {packages}.

Each mutant is tried against tests that execute its line, the cheapest first, until one fails or
their measured time exceeds {budget_s:g} seconds. A mutant that no chosen test notices survives,
even if a slower test would notice it.

| room | mutants | noticed | share |
|---|---|---|---|"""

Row = Mapping[str, Any]


def write(
    rows: Sequence[Row],
    first_reading: Mapping[str, int] | None,
    *,
    number: int,
    sites: int,
    seed: int,
    budget_s: float,
    out: Path,
    note: str = "",
) -> None:
    """Write the result as JSON and as a page next to it.

    `first_reading`: what it counted before any test was added for what survived; None: this is it.
    """
    if first_reading is None:
        first_reading = {"mutants": len(rows), "noticed": count_noticed(rows)}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "seed": seed,
        "number": number,
        "sites": sites,
        "budget_s": budget_s,
        "bar": BAR,
        "note": note,
        "first_reading": first_reading,
        "mutants": [_without_times(row) for row in rows],
    }
    reasons = yaml.safe_load(REASONS.read_text()) or {}
    for row in result["mutants"]:
        if row["outcome"] not in NOTICED:
            row["reason"] = reasons.get(row["key"], "Not examined.")
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(result))
    print(f"{count_noticed(rows)} of {len(rows)} noticed: {out}")


def count_noticed(rows: Sequence[Row]) -> int:
    return sum(row["outcome"] in NOTICED for row in rows)


def is_met(result: Mapping[str, Any]) -> bool:
    rows = result["mutants"]
    return len(rows) >= 300 and count_noticed(rows) >= BAR * len(rows)


def page(result: Mapping[str, Any]) -> str:
    """Return the page: shares by room, then what survived and why."""
    rows = result["mutants"]
    first = result["first_reading"]
    packages = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    text = TEXT.format(
        number=result["number"],
        judged=len(rows),
        seed=result["seed"],
        sites=result["sites"],
        first=_share(first["noticed"], first["mutants"]),
        second=_second(rows),
        further=_further(rows),
        bar=result["bar"],
        met="met" if is_met(result) else "not met",
        date=result["date"],
        machine=result["machine"],
        python=result["python"],
        packages=packages,
        budget_s=result["budget_s"],
    )
    if result["note"]:
        text = text.replace("\n\n| room", f"\n\n{result['note']}\n\n| room")
    lines = [text]
    for room, number in sorted(Counter(room_of(row) for row in rows).items()):
        noticed = count_noticed([row for row in rows if room_of(row) == room])
        lines.append(f"| {room} | {number} | {noticed} | {noticed / number:.0%} |")
    lines += ["", "## Survivors", "", "| place | change | reason |", "|---|---|---|"]
    for row in rows:
        if row["outcome"] not in NOTICED:
            change = f"`{_in_cell(row['before'])}` to `{_in_cell(row['after'])}`"
            place = f"`{row['file']}:{row['line']}` {row['function']}"
            lines.append(f"| {place} | {change} | {row['reason']} |")
    return "\n".join(lines) + "\n"


def room_of(row: Row) -> str:
    file: str = row["file"]
    parts = file.split("/")
    return "/".join(parts[1:3]) if parts[1] == "frameworks" else parts[1]


def _second(rows: Sequence[Row]) -> str:
    if all(row["reading"] == 1 for row in rows):
        return "none yet"
    return _share(count_noticed(rows), len(rows))


def _further(rows: Sequence[Row]) -> str:
    """Return how many were noticed at once of those that the first reading did not have."""
    further = [row for row in rows if row.get("further")]
    noticed = sum(row["first_outcome"] in NOTICED for row in further)
    return _share(noticed, len(further))


def _share(noticed: int, mutants: int) -> str:
    return f"{noticed} of {mutants} ({noticed / max(1, mutants):.1%})"


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _without_times(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("seconds", "budget_s")}
