"""Figures in a failure's message: their names, and how they are read.

A row of the table names groups in its pattern (`asked`, `free`, `total` with a unit beside them,
`length` ...). The list that torch appends to its first sentence is read in the same way for every
row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Numbers = Mapping[str, int | float]

_BYTES = ("asked", "free", "total")
_COUNTS = {
    "length": "longest_length",
    "length2": "longest_length",
    "wanted": "asked_length",
    "sequences": "asked_sequences",
}
"""Group names and figures. A group name must be unique in a pattern, hence the second name of a
length.
"""

_UNITS = {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_SIZE = r"(\d+(?:\.\d+)?) ([KMGT]?i?B|bytes)"
_TORCH: Mapping[str, re.Pattern[str]] = {
    "allowed_bytes": re.compile(rf"memory in use\. {_SIZE} allowed; "),
    "allocated_bytes": re.compile(
        rf"Of the allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated;"
    ),
    "idle_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "process_bytes": re.compile(
        rf"Including non-PyTorch memory, this process has {_SIZE} memory in use"
    ),
}
# Form before torch 2.1, which reports no idle memory.
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")

# Entry in torch's list of other processes on the GPU.
NEIGHBOUR = re.compile(r" ?Process (\d{1,10}) has [\d.]+ \w+ memory in use\.")

_NEIGHBOUR_SIZE = re.compile(rf"Process \d+ has {_SIZE} memory in use")


def numbers_of(match: re.Match[str], reported: str) -> dict[str, int | float]:
    """Return the figures of the match's groups and of torch's list in the text around it."""
    groups = match.groupdict()
    numbers: dict[str, int | float] = {}
    for name in _BYTES:
        if groups.get(name) is not None:
            own_unit = groups.get(f"{name}_unit")
            unit = own_unit or groups.get("total_unit") or "B"
            numbers[f"{name}_bytes"] = _bytes(groups[name], unit)
    for group, name in _COUNTS.items():
        if groups.get(group) is not None:
            numbers[name] = int(groups[group])
    other_milliseconds = groups.get("milliseconds2")
    milliseconds = groups.get("milliseconds") or other_milliseconds
    if milliseconds is not None:
        numbers["timeout_seconds"] = int(milliseconds) / 1000
    if groups.get("share") is not None:
        numbers["asked_share"] = float(groups["share"])
        if numbers.get("total_bytes"):
            total_bytes = numbers["total_bytes"]
            numbers["free_share"] = numbers["free_bytes"] / total_bytes
    if "ried to allocate" in reported:
        numbers |= _of_torch(reported)
    return numbers


def _of_torch(reported: str) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    for name, pattern in _TORCH.items():
        match = pattern.search(reported)
        if match is not None:
            figure, unit = filter(None, match.groups())
            numbers[name] = _bytes(figure, unit)
    reserved = _RESERVED.search(reported)
    can_tell = "idle_bytes" not in numbers and "allocated_bytes" in numbers
    if reserved is not None and can_tell:
        reserved_bytes = _bytes(*reserved.groups())
        idle = reserved_bytes - int(numbers["allocated_bytes"])
        numbers["idle_bytes"] = max(0, idle)
    sizes = _NEIGHBOUR_SIZE.findall(reported)
    neighbours = [_bytes(figure, unit) for figure, unit in sizes]
    # A process that does not know itself, as in a container, is one of those that are listed.
    if neighbours and "process_bytes" in numbers:
        numbers["others_bytes"] = sum(neighbours)
    return numbers


def _bytes(figure: str, unit: str) -> int:
    """Return a figure of bounded size: broken logs have some of hundreds of digits."""
    factor = _UNITS.get(unit[0].upper(), 1)
    size = min(float(figure) * factor, 2.0**63)
    return int(size)


def without_neighbours(text: str) -> str:
    """Return torch's message without its list of other processes."""
    return NEIGHBOUR.sub("", text)
