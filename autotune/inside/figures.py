"""Speed out of a run's own words: lines of JSON, printed dictionaries, or lines that a pattern finds.

What to read is said by a specification in JSON, which a framework's file in `autotune.trainers` words:

    {"file": "{out}/metrics.jsonl" | null,      null reads what the run prints
     "kind": "json" | "python" | "pattern",
     "line": regex | null,                      pattern: with groups named as below; else what stands before and after the record
                                                (group `record`), null for a line that is nothing else
     "under": "data" | null,                    the record's own key, below which the figures are
     "keys": {"tokens_per_second": [...], "tokens": [...], "tokens_so_far": [...], "seconds": [...]},
                                                the record's keys; of several the sum
     "products": {"tokens": [...]},             the same, multiplied
     "times": 1.0,                              tokens and tokens_per_second are multiplied by it (GPUs, where each is told)
     "tokens_each": n | null}                   tokens of one record, where the run does not tell

Of tokens, seconds and tokens per second two are enough; where only one is told, the seconds are those since the record before.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("tokens_per_second", "tokens", "tokens_so_far", "seconds")
LONGEST_LINE = 2**20

_NO_NUMBER = re.compile(r"(?<![\w'\"./])-?(?:nan|inf)(?![\w'\"./])")
"""In a printed dictionary, which Python itself would not read back."""


@dataclass(frozen=True)
class Figure:
    """One record: tokens and the seconds they took."""

    tokens: int
    seconds: float


class Reader:
    """From lines, as they come, to figures."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._line = re.compile(spec["line"]) if spec.get("line") else None
        self._before: float | None = None
        self._tokens_before: float | None = None
        self.records = 0
        """Lines that held figures, the first among them, which may lack what it is measured from."""

    def read(self, line: str, now: float) -> Figure | None:
        """The line's figure; None where it has none, or nothing yet to take the seconds from."""
        found = self._numbers(line)
        if not found:
            return None
        self.records += 1
        since = None if self._before is None else now - self._before
        self._before = now
        return self._figure(found, since)

    def _figure(self, found: dict[str, float], since: float | None) -> Figure | None:
        seconds = found.get("seconds") or since
        tokens = found.get("tokens")
        if "tokens_so_far" in found:
            before, self._tokens_before = self._tokens_before, found["tokens_so_far"]
            tokens = None if before is None else found["tokens_so_far"] - before
        elif tokens is None and self._spec.get("tokens_each"):
            tokens = float(self._spec["tokens_each"])
        if tokens is None and seconds and found.get("tokens_per_second"):
            tokens = found["tokens_per_second"] * seconds
        if not tokens or not seconds or tokens < 0 or seconds <= 0:
            return None
        return Figure(max(1, round(tokens * float(self._spec.get("times") or 1.0))), seconds)

    def _numbers(self, line: str) -> dict[str, float]:
        if self._spec["kind"] == "pattern":
            match = self._line.search(line) if self._line else None
            groups = match.groupdict() if match else {}
            return {name: value for name in NAMES if (value := _number(groups.get(name))) is not None}
        record = self._record(line)
        if record is None:
            return {}
        keys, products = self._spec.get("keys"), self._spec.get("products") or {}
        sums = {name: [name] for name in NAMES} if keys is None else keys
        return {**_over(sum, record, sums), **_over(math.prod, record, products)}

    def _record(self, line: str) -> Mapping[str, Any] | None:
        if self._line is not None:
            match = self._line.search(line)
            if match is None:
                return None
            line = match["record"]
        try:
            record = json.loads(line) if self._spec["kind"] == "json" else ast.literal_eval(_NO_NUMBER.sub("None", line.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        under = self._spec.get("under")
        record = record.get(under) if under and isinstance(record, dict) else record
        return record if isinstance(record, dict) else None


def _over(together: Callable[[list[float]], float], record: Mapping[str, Any], keys: Mapping[str, list[str]]) -> dict[str, float]:
    found = {}
    for name, parts in keys.items():
        values = [_number(record.get(part)) for part in parts]
        known = [value for value in values if value is not None]
        if known and len(known) == len(parts):
            found[name] = together(known)
    return found


def _number(value: object) -> float | None:
    """A finite number above nothing, also where it is written as text: `1,234.5`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.replace(",", "") if isinstance(value, str) else value)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


class Tail:
    """The lines that are added to a file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0  # what is there already is another run's
        self._rest = b""

    def lines(self) -> Iterator[str]:
        try:
            size = self._path.stat().st_size
            if size < self._at:  # begun anew
                self._at, self._rest = 0, b""
            if size == self._at:
                return
            with self._path.open("rb") as file:
                file.seek(self._at)
                piece = file.read(LONGEST_LINE)
        except OSError:
            return
        self._at += len(piece)
        *whole, self._rest = (self._rest + piece).split(b"\n")
        self._rest = self._rest[-LONGEST_LINE:]
        yield from (line.decode(errors="replace") for line in whole)


def listener(spec: Mapping[str, Any], folder: Path) -> Callable[[list[str]], list[str]]:
    """Given the lines that were printed since, those in which the figures are: these, or a file's."""
    if not spec.get("file"):
        return lambda printed: printed
    path = Path(str(spec["file"]).replace("{out}", str(folder)))
    tail = Tail(path)
    return lambda _: list(tail.lines())
