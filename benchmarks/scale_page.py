"""Page results/scale.md, created from results/scale.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from machine import versions_text

ABOUT = {
    "sleeping": (
        "Probes that sleep for a second, through the whole driver, its study and its database. In"
        " the ideal nothing but the sleeping takes time."
    ),
    "real": "Probes that compute for half a second, in processes of their own under real limits.",
    "driver": (
        "What asking and telling cost by themselves: so many asked for and not told at any time,"
        " nothing measured. Whatever else the machine does lengthens the processor's time less than"
        " the other figures, which are by the clock."
    ),
    "memory": (
        "The driver's resident memory, looked at ten times while a study of so many trials grows."
    ),
    "ray": (
        "Two nodes of a Ray cluster on this machine, and what a probe that does nothing takes there"
        " and without Ray."
    ),
}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [_part(name, about, results[name]) for name, about in ABOUT.items() if name in results]
    return (
        "\n\n".join(["# How the search scales", "`make bench-scale`, part by part.", *parts]) + "\n"
    )


def _part(
    name: str,
    about: str,
    part: Mapping[str, Any],
) -> str:
    rows = [{key: _in_words(value) for key, value in row.items()} for row in part["rows"]]
    return "\n\n".join([f"## {name}", about, _where(part), "\n".join(_table(rows))])


def _where(part: Mapping[str, Any]) -> str:
    machine = part["machine"]
    versions = versions_text(machine["versions"])
    return (
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}),"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; {versions}; load average"
        f" {part['load_average_before']} before; commit {machine['commit']}."
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return str(value)


def _table(rows: Sequence[Mapping[str, str]]) -> Iterable[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(name.replace("_", " ") for name in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row.get(name, "") for name in columns) + " |"
