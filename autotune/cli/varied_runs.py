"""Several values of one argument in one rehearsal: `--vary micro=1,2,4`.

The argument is found in the command as `--micro 8`, `--micro=8` or `micro=8`; dashes and
underscores are equal. A script without such an argument has `{micro}` where the value belongs:

    autotune rehearse --gpus L4 --vary micro=1,2 -- python train.py --batch 8 --micro {micro}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.errors import BadInput
from autotune.core.units import format_bytes

FORM = "--vary NAME=VALUE,VALUE"


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Argument of a command, and the values that it takes in turn."""

    name: str
    values: tuple[str, ...]

    def commands(self, arguments: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the command with each value; BadInput for a command without the argument."""
        places = _places(arguments, self.name)
        if not places:
            raise BadInput(
                f"COMMAND has no argument {self.name}.",
                way_out=f"Write {{{self.name}}} where the value belongs.",
            )
        commands = []
        for value in self.values:
            changed = list(arguments)
            for place, head, tail in places:
                changed[place] = f"{head}{value}{tail}"
            commands.append(tuple(changed))
        return commands


def variation(text: str) -> Variation:
    """Return the variation that `micro=1,2,4` states."""
    name, equals, listed = text.partition("=")
    values: dict[str, None] = {}
    for value in listed.split(","):
        if value.strip():
            values[value.strip()] = None
    if not equals or not name.strip() or not values:
        raise BadInput(f"--vary {text!r} is not of the form {FORM}.", way_out=f"Write {FORM}.")
    return Variation(name=name.strip(), values=tuple(values))


def _places(arguments: Sequence[str], name: str) -> list[tuple[int, str, str]]:
    """Return the arguments that hold the value: their position, and what surrounds it."""
    placeholder = f"{{{name}}}"
    places = []
    for place, word in enumerate(arguments):
        if placeholder in word:
            head, _, tail = word.partition(placeholder)
            places.append((place, head, tail))
    if places:
        return places

    for place, word in enumerate(arguments):
        argument, equals, _ = word.partition("=")
        if not _is_name(argument, name):
            continue
        if equals:
            places.append((place, f"{argument}=", ""))
        elif word.startswith("-") and place + 1 < len(arguments):
            places.append((place + 1, "", ""))
    return places[-1:]  # the last one counts, as in argparse and Hydra


def _is_name(argument: str, name: str) -> bool:
    return argument.lstrip("-+").replace("-", "_") == name.lstrip("-").replace("-", "_")


def table(name: str, documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line for each value: how it ended, and the highest peaks of any process."""
    header = [name, "ended", "peak", "allocated", "reserved"]
    phases: dict[str, None] = {}
    for document in documents.values():
        for process in document["processes"]:
            phases.update(dict.fromkeys(process["phase_peak_bytes"]))
    rows = [[*header, *phases]]
    for value, document in documents.items():
        processes = document["processes"]
        row = [value, document["status"].replace("_", " ")]
        for key in _COLUMNS:
            row.append(_largest(process[key] for process in processes))
        for phase in phases:
            row.append(_largest(process["phase_peak_bytes"].get(phase) for process in processes))
        rows.append(row)
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with columns of equal width."""
    widths = [0] * len(rows[0])
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += cell.ljust(width + 2)
        lines.append(line.rstrip())
    return lines


_COLUMNS = ("peak_bytes", "torch_allocated_bytes", "torch_reserved_bytes")


def _largest(sizes: Iterable[int | None]) -> str:
    """Return the largest known size as text."""
    largest = 0
    for size in sizes:
        largest = max(largest, size or 0)
    return format_bytes(largest) if largest else "-"
