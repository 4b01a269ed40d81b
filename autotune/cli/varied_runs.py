"""Several values of one argument in one rehearsal: `--vary micro=1,2,4`.

The argument is found in the command as `--micro 8`, `--micro=8` or `micro=8`; dashes and
underscores are equal. A script without such an argument has `{micro}` where the value belongs:

    autotune rehearse --gpus L4 --vary micro=1,2 -- python train.py --batch 8 --micro {micro}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def commands(self, words: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the command with each value; BadInput for a command without the argument."""
        places = _places(words, self.name)
        if not places:
            raise BadInput(
                f"COMMAND has no argument {self.name}.",
                way_out=f"Write {{{self.name}}} where the value belongs.",
            )
        commands = []
        for value in self.values:
            changed = list(words)
            for place, head, tail in places:
                changed[place] = f"{head}{value}{tail}"
            commands.append(tuple(changed))
        return commands


def variation(text: str) -> Variation:
    """Return the variation that `micro=1,2,4` states."""
    name, equals, listed = text.partition("=")
    values = tuple(dict.fromkeys(value.strip() for value in listed.split(",") if value.strip()))
    if not equals or not name.strip() or not values:
        raise BadInput(f"--vary {text!r} is not of the form {FORM}.", way_out=f"Write {FORM}.")
    return Variation(name=name.strip(), values=values)


def _places(words: Sequence[str], name: str) -> list[tuple[int, str, str]]:
    """Return the words that hold the value: their position, and what surrounds it."""
    placeholder = f"{{{name}}}"
    places = []
    for place, word in enumerate(words):
        if placeholder in word:
            head, _, tail = word.partition(placeholder)
            places.append((place, head, tail))
    if places:
        return places

    for place, word in enumerate(words):
        argument, equals, _ = word.partition("=")
        if not _is_name(argument, name):
            continue
        if equals:
            places.append((place, f"{argument}=", ""))
        elif word.startswith("-") and place + 1 < len(words):
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
        sizes = [_highest(processes, key) for key in _COLUMNS]
        for phase in phases:
            peaks = [process["phase_peak_bytes"].get(phase) for process in processes]
            sizes.append(_largest(peaks))
        rows.append([value, document["status"].replace("_", " "), *sizes])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


_COLUMNS = ("peak_bytes", "torch_allocated_bytes", "torch_reserved_bytes")


def _highest(processes: Sequence[Mapping[str, Any]], key: str) -> str:
    return _largest([process[key] for process in processes])


def _largest(sizes: Sequence[int | None]) -> str:
    stated = [size for size in sizes if size is not None]
    return format_bytes(max(stated)) if stated else "-"
