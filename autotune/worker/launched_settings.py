"""Settings of a launched run as the run itself reports them, which may differ from the given ones.

The JSON specification comes from a framework's file in `autotune.frameworks`:

    {"file": "{autotune_run_folder}/settings.json" | null,      null: standard output
     "kind": "json" | "hydra" | "yaml" | "namespace" | "table"}

`json`: a file with one mapping. `hydra`: the YAML that Hydra writes of a configuration, read by the run's own
OmegaConf, which resolves references. `yaml`: the same as printed lines, from a top-level key at the end of a line.
`namespace`: a printed line of argparse, `namespace(train=namespace(batch_size=8), ...)`. `table`: a printed table of
names and values, with a blank between the columns. Nested settings have dotted names. Unreadable values are left out;
nothing is executed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 2**20
_YAML_BEGINS = re.compile(r" - (?P<line>[a-z]\w*:)$")
# Ray puts the process before each line.
_YAML_LINE = re.compile(
    r"(?:\x1b\[\d+m)?(?:\(\w[^()]* pid=[^()]*\)(?:\x1b\[0m)? )?(?P<line>(?: *- ?.*| *[\w/]+:(?: .*)?| {2,}\S.*))"
)
_NAMESPACE = re.compile(r"\b[Nn]amespace\(")
_TABLE = re.compile(r"-{3,} config key -{3,}\s+-{3,} value -{3,}")
_ROW = re.compile(r"(?P<name>[A-Za-z]\w*)(?: +(?P<value>\S.*))?")
# None in a table, which prints the class of each value that is not plain.
_NONE = "<class 'NoneType'>"
_CLASS = re.compile(r"<class '[\w.]+'>")
_UNREADABLE = (ValueError, SyntaxError, MemoryError, RecursionError)


class LaunchedSettings:
    """Reader of printed settings line by line, or of a settings file after the run."""

    def __init__(self, spec: Mapping[str, Any] | None, resolve: Callable[[str], str]) -> None:
        self._kind = spec["kind"] if spec else None
        self._file = Path(resolve(spec["file"])) if spec and spec.get("file") else None
        self._printed: dict[str, Any] = {}
        self._in_table = False
        self._yaml: list[str] = []
        self._yaml_ended = False

    def read_line(self, line: str) -> None:
        if self._kind == "namespace" and not self._printed and len(line) < MAX_TEXT_BYTES:
            self._printed = from_namespace(line)
        elif self._kind == "yaml":
            # The lines of a printed document, which ends at the first line of another form.
            begins = _YAML_BEGINS.search(line)
            if begins is not None:
                self._yaml = [begins["line"]]
            elif self._yaml and not self._yaml_ended:
                match = _YAML_LINE.fullmatch(line)
                self._yaml_ended = match is None
                self._yaml += [] if match is None else [match["line"]]
        elif self._kind == "table" and _TABLE.search(line):
            self._in_table = not self._printed  # only the first of several tables
        elif self._in_table:
            row = _ROW.fullmatch(line.rstrip())
            self._in_table = row is not None
            if row is not None:
                self._printed |= _from_row(row["name"], row["value"] or "")

    def found(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the reported values of these settings."""
        if self._kind == "yaml":
            return from_hydra("\n".join(self._yaml), names)
        written: Any = self._printed
        if self._file is not None:
            try:
                with self._file.open(encoding="utf-8") as file:
                    text = file.read(MAX_TEXT_BYTES)
                written = from_hydra(text, names) if self._kind == "hydra" else json.loads(text)
            except (OSError, ValueError, RecursionError):
                return {}
        return {name: written[name] for name in names if name in written} if isinstance(written, dict) else {}


def from_hydra(text: str, names: Iterable[str]) -> dict[str, Any]:
    """Read a Hydra configuration; empty without OmegaConf, for then Hydra did not write it."""
    try:
        from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    found: dict[str, Any] = {}
    missing = object()
    try:
        config = OmegaConf.create(text)  # plain data: OmegaConf uses PyYAML's safe loader
    except Exception:  # of many classes, PyYAML's and OmegaConf's
        return {}
    for name in names:
        try:
            value = OmegaConf.select(config, name, default=missing)
        except Exception:  # a reference that only the run itself can resolve
            continue
        if value is not missing:
            found[name] = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
    return found


def from_namespace(line: str) -> dict[str, Any]:
    """Parse a printed namespace: keyword calls and plain values only. Nothing is called."""
    start = _NAMESPACE.search(line)
    try:
        return {} if start is None else dict(_from_call(ast.parse(line[start.start() :].strip(), mode="eval").body, ""))
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


def _from_row(name: str, value: str) -> dict[str, Any]:
    if _CLASS.fullmatch(value):
        return {name: None} if value == _NONE else {}
    try:
        return {name: ast.literal_eval(value)}
    except _UNREADABLE:
        return {name: value}
