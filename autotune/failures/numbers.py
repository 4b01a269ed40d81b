"""What a message measured itself: which numbers there are, what they are called, and how they are read.

A row of the table names groups in its pattern (`asked`, `free`, `total` with a unit beside them, `length` ...); what torch
lists behind its first sentence is read the same way for each of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Numbers = Mapping[str, int | float]

NUMBERS: Mapping[str, str] = {
    "asked_bytes": "what was asked for at once: an allocation, vLLM's whole share, or the KV cache of one longest sequence",
    "free_bytes": "what was free for it then: of the device, of the limit, or of vLLM's budget for its cache",
    "total_bytes": "what there is in all: the device's, or the limit",
    "allowed_bytes": "what torch was allowed to take of the device, where that is less than all of it",
    "allocated_bytes": "in use by tensors, by torch's own account",
    "idle_bytes": "reserved by torch and in no tensor: in pieces too small, or kept for another stream",
    "process_bytes": "what the failing process held of the device in all",
    "others_bytes": "what other processes held of the same device",
    "asked_share": "the share of the memory that vLLM was told to take, from 0 to 1",
    "free_share": "the share that was free when vLLM started: the largest that it would have taken",
    "asked_length": "the longest sequence that was asked for, in tokens",
    "longest_length": "the longest sequence that would have fitted, or that is allowed, in tokens",
    "asked_sequences": "how many sequences vLLM was to hold at once",
    "timeout_seconds": "how long a process waited for the others",
}

_BYTES = ("asked", "free", "total")
_COUNTS = {"length": "longest_length", "length2": "longest_length", "wanted": "asked_length", "sequences": "asked_sequences"}
"""A name cannot stand twice in a pattern of alternatives: the second one has a number."""

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) ([KMGT]?i?B|bytes)"
_TORCH: Mapping[str, re.Pattern[str]] = {
    "allowed_bytes": re.compile(rf"memory in use\. {_SIZE} allowed; "),
    "allocated_bytes": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated;"),
    "idle_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "process_bytes": re.compile(rf"Including non-PyTorch memory, this process has {_SIZE} memory in use"),
}
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
"""Before torch 2.1: what is idle of that was not said."""

UNSEEN_SHARE = 0.5
"""What is neither free nor anybody's by torch's own list is somebody's that it can't see, as of another container. What a driver
and its contexts hold is in no list either, so that only a large share counts."""

NEIGHBOUR = re.compile(r" ?Process (\d{1,10}) has [\d.]+ \w+ memory in use\.")
"""One entry of torch's list of who else is on the GPU, with its number."""

_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")


def numbers_of(match: re.Match[str], told: str) -> dict[str, int | float]:
    """By the groups of what matched, and by what torch lists in the text around it."""
    groups = match.groupdict()
    found: dict[str, int | float] = {}
    for name in _BYTES:
        if groups.get(name) is not None:
            found[f"{name}_bytes"] = _bytes(groups[name], groups.get(f"{name}_unit") or groups.get("total_unit") or "B")
    for group, name in _COUNTS.items():
        if groups.get(group) is not None:
            found[name] = int(groups[group])
    waited = groups.get("milliseconds") or groups.get("milliseconds2")
    if waited is not None:
        found["timeout_seconds"] = int(waited) / 1000
    if groups.get("share") is not None:
        found |= _shares(float(groups["share"]), found)
    if "ried to allocate" in told:
        found |= _of_torch(told)
    return found


def mostly_unseen(numbers: Numbers) -> bool:
    """Whether most of the device is in use by nobody that torch knows of."""
    total, free, own = (numbers.get(name) for name in ("total_bytes", "free_bytes", "process_bytes"))
    if total is None or free is None or own is None:
        return False
    return total - free - own - numbers.get("others_bytes", 0) >= UNSEEN_SHARE * total


def _shares(share: float, found: Mapping[str, int | float]) -> dict[str, int | float]:
    shares: dict[str, int | float] = {"asked_share": share}
    if found.get("total_bytes"):
        shares["free_share"] = found["free_bytes"] / found["total_bytes"]
    return shares


def _of_torch(told: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for name, pattern in _TORCH.items():
        match = pattern.search(told)
        if match is not None:
            figure, unit = (part for part in match.groups() if part is not None)
            found[name] = _bytes(figure, unit)
    reserved = _RESERVED.search(told)
    if reserved is not None and "idle_bytes" not in found and "allocated_bytes" in found:
        found["idle_bytes"] = max(0, _bytes(*reserved.groups()) - int(found["allocated_bytes"]))
    others = [_bytes(figure, unit) for figure, unit in _OTHERS.findall(told)]
    # A process that does not know itself, as in a container, is one of those that are listed.
    if others and "process_bytes" in found:
        found["others_bytes"] = sum(others)
    return found


def _bytes(figure: str, unit: str) -> int:
    return int(float(figure) * _UNITS.get(unit[0].upper(), 1))


def without_neighbours(text: str) -> str:
    """What torch says, but for its list of who else is on the GPU."""
    return NEIGHBOUR.sub("", text)
