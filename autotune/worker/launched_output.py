"""Output of a launched run: its speed, and its settings as the run itself reports them, which may
differ from the given ones.

The JSON specifications come from a framework's file in `autotune.frameworks`. That of the speed:

    file         "{autotune_run_folder}/metrics.jsonl"; null: standard output
    kind         "json" | "python" | "pattern"
    line         regex or null. pattern: with groups named as the keys below. Else the text around
                 the record, which is the group `record`; null for a line that is only the record
    under        the record's key that contains the figures, or null
    keys         {"tokens_per_second": [...], "tokens": [...], "tokens_so_far": [...],
                 "seconds": [...]}: the record's keys; several are added
    products     {"tokens": [...]}: the same, multiplied
    times        factor on tokens and tokens_per_second (GPUs, if figures are per GPU)
    tokens_each  tokens of one record, if the run does not report them; null

Two of tokens, seconds and tokens per second are enough. With only one, the seconds are those since
the previous record. The specification of the settings:

    file         "{autotune_run_folder}/settings.json"; null: standard output
    kind         "json" | "hydra" | "yaml" | "namespace" | "table"

`json`: a file with one mapping. `hydra`: the YAML that Hydra writes of a configuration, read by the
run's own OmegaConf, which resolves references. `yaml`: the same as printed lines, from a top-level
key at the end of a line. `namespace`: a printed line of argparse,
`namespace(train=namespace(batch_size=8), ...)`. `table`: a printed table of names and values, with
a blank between the columns. Nested settings have dotted names. Unreadable values are left out;
nothing is executed.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .protocol import Arguments, Request

METRIC_NAMES = ("tokens_per_second", "tokens", "tokens_so_far", "seconds")
MAX_LOG_READ_BYTES = 2**20
MAX_FIGURE = 2.0**60  # The largest count that a measurement can hold
_UNREADABLE = (ValueError, SyntaxError, MemoryError, RecursionError)

# Numbers in a printed dictionary that are no Python literals.
_NOT_FINITE = re.compile(r"(?<![\w'\"./])-?(?:nan|inf)(?![\w'\"./])")


# Speed.


class Figure(NamedTuple):
    """Record of a run: tokens and their duration."""

    tokens: int
    seconds: float


class MetricReader:
    """Reads a run's records, one after the other."""

    def __init__(self, spec: Request) -> None:
        self._spec = spec
        self._line: re.Pattern[str] | None = None
        if spec.get("line"):
            self._line = re.compile(spec["line"])
        self._previous: float | None = None  # time of the record before
        self._tokens_so_far: float | None = None
        self.records = 0  # lines with figures, including the first, which may have no duration

    def read(self, line: str, now: float) -> Figure | None:
        """Return the line's figure; None if it has none, or no known duration."""
        numbers = self._numbers(line)
        if not numbers:
            return None
        self.records += 1
        seconds = self._seconds(numbers, now)
        tokens = self._tokens(numbers, seconds)
        if not tokens or not seconds or tokens < 0 or seconds <= 0:
            return None
        factor = float(self._spec.get("times") or 1.0)
        if tokens * factor > MAX_FIGURE:
            return None
        scaled_tokens = max(1, round(tokens * factor))
        return Figure(scaled_tokens, seconds)

    def _seconds(self, numbers: Mapping[str, float], now: float) -> float | None:
        """Return the reported seconds, else those since the previous record."""
        previous, self._previous = self._previous, now
        if numbers.get("seconds"):
            return numbers["seconds"]
        return None if previous is None else now - previous

    def _tokens(self, numbers: Mapping[str, float], seconds: float | None) -> float | None:
        tokens = numbers.get("tokens")
        if "tokens_so_far" in numbers:
            before, self._tokens_so_far = self._tokens_so_far, numbers["tokens_so_far"]
            tokens = None if before is None else self._tokens_so_far - before
        elif tokens is None and self._spec.get("tokens_each"):
            tokens = float(self._spec["tokens_each"])
        if tokens is None and seconds and numbers.get("tokens_per_second"):
            tokens = numbers["tokens_per_second"] * seconds
        return tokens

    def _numbers(self, line: str) -> dict[str, float]:
        """Return the line's numbers by name, one of NAMES."""
        match = self._line.search(line) if self._line is not None else None
        if self._spec["kind"] == "pattern":
            return {} if match is None else _combined(sum, match.groupdict(), ITSELF)
        if self._line is not None:
            if match is None:
                return {}
            line = match["record"]
        record = self._record(line)
        if not isinstance(record, dict):
            return {}
        keys = self._spec.get("keys")
        sums = _combined(sum, record, ITSELF if keys is None else keys)
        products = _combined(math.prod, record, self._spec.get("products") or {})
        return {**sums, **products}

    def _record(self, text: str) -> Any:
        """Parse a record. Return its part with the figures; None if it can't be read."""
        try:
            if self._spec["kind"] == "json":
                record = json.loads(text)
            else:
                finite = _NOT_FINITE.sub("None", text.strip())
                record = ast.literal_eval(finite)
        except _UNREADABLE:
            return None
        under = self._spec.get("under")
        return record.get(under) if under and isinstance(record, dict) else record


ITSELF: Mapping[str, list[str]] = {name: [name] for name in METRIC_NAMES}
"""Keys of a record whose keys are the names of the figures."""


def _combined(
    combine: Callable[[list[float]], float],
    record: Mapping[str, Any],
    keys: Mapping[str, list[str]],
) -> dict[str, float]:
    """Combine the record's values by name. A name with a missing part has no value."""
    combined = {}
    for name, parts in keys.items():
        values = []
        for part in parts:
            value = _number(record.get(part))
            if value is not None:
                values.append(value)
        if values and len(values) == len(parts):
            combined[name] = combine(values)
    return combined


def _number(value: object) -> float | None:
    """Return a number above 0 that may be a figure, also from text such as `1,234.5`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        value = value.replace(",", "")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number <= MAX_FIGURE else None


# Lines.


class Tail:
    """Lines that are appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Existing lines belong to another run.
        self._offset = path.stat().st_size if path.exists() else 0
        self._incomplete = b""  # the last line

    def lines(self) -> Iterator[str]:
        try:
            size = self._path.stat().st_size
            if size < self._offset:  # written anew
                self._offset = 0
                self._incomplete = b""
            if size == self._offset:
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                piece = file.read(MAX_LOG_READ_BYTES)
        except OSError:
            return
        self._offset += len(piece)
        parts = (self._incomplete + piece).split(b"\n")
        *lines, incomplete = parts
        self._incomplete = incomplete[-MAX_LOG_READ_BYTES:]
        for line in lines:
            yield line.decode(errors="replace")


def line_source(spec: Request, folder: Path) -> Callable[[list[str]], list[str]]:
    """Return a function from new printed lines to lines with figures: the same, or a file's."""
    if not spec.get("file"):
        return lambda printed: printed
    file = str(spec["file"])
    path = file.replace("{autotune_run_folder}", str(folder))
    tail = Tail(Path(path))
    return lambda _: list(tail.lines())


# Settings.

MAX_TEXT_BYTES = 2**20
_YAML_BEGINS = re.compile(r" - (?P<line>[a-z]\w*:)$")
# Ray puts the process before each line.
_YAML_LINE = re.compile(
    r"(?:\x1b\[\d+m)?(?:\(\w[^()]* pid=[^()]*\)(?:\x1b\[0m)? )?(?P<line>(?: *- ?.*| *[\w/]+:(?:"
    r" .*)?| {2,}\S.*))"
)
_NAMESPACE = re.compile(r"\b[Nn]amespace\(")
_TABLE = re.compile(r"-{3,} config key -{3,}\s+-{3,} value -{3,}")
_ROW = re.compile(r"(?P<name>[A-Za-z]\w*)(?: +(?P<value>\S.*))?")
# None in a table, which prints the class of each value that is not plain.
_NONE = "<class 'NoneType'>"
_CLASS = re.compile(r"<class '[\w.]+'>")


class LaunchedSettings:
    """Reader of printed settings line by line, or of a settings file after the run."""

    def __init__(self, spec: Request | None, resolve: Callable[[str], str]) -> None:
        spec = spec or {}
        self._kind = spec.get("kind")
        self._file: Path | None = None
        if spec.get("file"):
            self._file = Path(resolve(spec["file"]))
        self._printed: Arguments = {}  # of a namespace or a table
        self._in_table = False
        self._yaml: list[str] = []  # lines of a printed document
        self._yaml_ended = False

    def read_line(self, line: str) -> None:
        if self._kind == "namespace":
            if not self._printed and len(line) < MAX_TEXT_BYTES:
                self._printed = from_namespace(line)
        elif self._kind == "yaml":
            self._read_yaml_line(line)
        elif self._kind == "table":
            self._read_table_line(line)

    def _read_yaml_line(self, line: str) -> None:
        """Collect a document, which ends at the first line of another form."""
        begins = _YAML_BEGINS.search(line)
        if begins is not None:
            self._yaml = [begins["line"]]
        elif self._yaml and not self._yaml_ended:
            match = _YAML_LINE.fullmatch(line)
            if match is None:
                self._yaml_ended = True
            else:
                self._yaml.append(match["line"])

    def _read_table_line(self, line: str) -> None:
        if _TABLE.search(line):
            self._in_table = not self._printed  # only the first of several tables
        elif self._in_table:
            row = _ROW.fullmatch(line.rstrip())
            if row is None:
                self._in_table = False
            else:
                self._printed |= _from_row(row["name"], row["value"] or "")

    def reported_values(self, names: Iterable[str]) -> Arguments:
        """Return the reported values of these settings."""
        if self._kind == "yaml":
            return from_hydra("\n".join(self._yaml), names)
        reported: Any = self._printed
        if self._file is not None:
            reported = self._read_file(self._file, names)
        if not isinstance(reported, dict):
            return {}
        return {name: reported[name] for name in names if name in reported}

    def _read_file(self, path: Path, names: Iterable[str]) -> Any:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MAX_TEXT_BYTES)
            return from_hydra(text, names) if self._kind == "hydra" else json.loads(text)
        except (OSError, ValueError, RecursionError):
            return {}


def from_hydra(text: str, names: Iterable[str]) -> Arguments:
    """Read a Hydra configuration; empty without OmegaConf, for then Hydra did not write it."""
    try:
        from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    try:
        config = OmegaConf.create(text)  # plain data: OmegaConf uses PyYAML's safe loader
    except Exception:  # of many classes, PyYAML's and OmegaConf's
        return {}
    settings: Arguments = {}
    missing = object()
    for name in names:
        try:
            value = OmegaConf.select(config, name, default=missing)
        except Exception:  # a reference that only the run itself can resolve
            continue
        if value is missing:
            continue
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        settings[name] = value
    return settings


def from_namespace(line: str) -> Arguments:
    """Parse a printed namespace: keyword calls and plain values only. Nothing is called."""
    start = _NAMESPACE.search(line)
    if start is None:
        return {}
    text = line[start.start() :].strip()
    try:
        tree = ast.parse(text, mode="eval")
        return dict(_from_call(tree.body, ""))
    except _UNREADABLE:
        return {}


def _from_call(node: ast.expr, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        name = f"{prefix}{keyword.arg}"
        if isinstance(keyword.value, ast.Call):
            yield from _from_call(keyword.value, f"{name}.")
            continue
        try:
            yield name, ast.literal_eval(keyword.value)
        except ValueError:  # inf, or an object of a class
            continue


def _from_row(name: str, value: str) -> Arguments:
    if value == _NONE:
        return {name: None}
    if _CLASS.fullmatch(value):
        return {}
    try:
        return {name: ast.literal_eval(value)}
    except _UNREADABLE:
        return {name: value}
