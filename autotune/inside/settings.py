"""A launched run's settings as the run itself has them, which need not be those that it was given.

Where they stand is said by a specification in JSON, which a framework's file in `autotune.trainers` words:

    {"file": "{out}/settings.json" | null,      null reads what the run prints
     "kind": "json" | "hydra" | "namespace" | "table"}

`json` is a file of one mapping. `hydra` is the YAML that Hydra writes of a configuration, read by the run's own OmegaConf, which
knows what its references come to. `namespace` is a printed line of argparse, `namespace(train=namespace(batch_size=8), ...)`.
`table` is a printed table of names and values, a blank between its columns. Whatever is nested is named with dots. What can't be
read is left out: nothing here guesses, and nothing is ever run that was read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LARGEST_TEXT = 2**20
_NAMESPACE = re.compile(r"\b[Nn]amespace\(")
_TABLE = re.compile(r"-{3,} config key -{3,}\s+-{3,} value -{3,}")
_ROW = re.compile(r"(?P<name>[A-Za-z]\w*)(?: +(?P<value>\S.*))?")
_NOTHING = "<class 'NoneType'>"
"""How the table shows None: by its class, as it does whatever is no plain value."""

_CLASS = re.compile(r"<class '[\w.]+'>")


class Settings:
    """Listens to what is printed, and looks into the file once the run has ended."""

    def __init__(self, spec: Mapping[str, Any] | None, placed: Callable[[str], str]) -> None:
        self._kind = spec["kind"] if spec else None
        self._file = Path(placed(spec["file"])) if spec and spec.get("file") else None
        self._heard: dict[str, Any] = {}
        self._in_table = False

    def hear(self, line: str) -> None:
        if self._kind == "namespace" and not self._heard and len(line) < LARGEST_TEXT:
            self._heard = dict(of_namespace(line))
        elif self._kind == "table":
            self._hear_row(line)

    def _hear_row(self, line: str) -> None:
        if _TABLE.search(line):
            self._in_table = not self._heard  # the first, should there be another
        elif self._in_table:
            found = _ROW.fullmatch(line.rstrip())
            self._in_table = found is not None
            if found is not None:
                self._heard |= _of_row(found["name"], found["value"] or "")

    def found(self, asked: Iterable[str]) -> dict[str, Any]:
        """Of those that were asked about, the ones that it told."""
        written = self._heard if self._file is None else self._written(asked)
        return {name: written[name] for name in asked if name in written}

    def _written(self, asked: Iterable[str]) -> Mapping[str, Any]:
        try:
            assert self._file is not None
            with self._file.open(encoding="utf-8") as file:
                text = file.read(LARGEST_TEXT)
            return of_hydra(text, asked) if self._kind == "hydra" else of_json(text)
        except (OSError, ValueError, RecursionError):
            return {}


def of_json(text: str) -> Mapping[str, Any]:
    written = json.loads(text)
    return written if isinstance(written, dict) else {}


def of_hydra(text: str, asked: Iterable[str]) -> dict[str, Any]:
    """Nothing where OmegaConf is not there: then it was not Hydra that wrote this."""
    try:
        from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return {}
    found: dict[str, Any] = {}
    missing = object()
    try:
        made = OmegaConf.create(text)  # as plain data, and no more: its reader is PyYAML's safe one
    except Exception:  # of many kinds: PyYAML's, and OmegaConf's own
        return {}
    for name in asked:
        try:
            value = OmegaConf.select(made, name, default=missing)
        except Exception:  # a reference to something that only exists inside of the run
            continue
        if value is not missing:
            found[name] = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
    return found


def of_namespace(line: str) -> Iterator[tuple[str, Any]]:
    """By Python's own grammar, of which calls by name and plain values are taken, and nothing is called."""
    begins = _NAMESPACE.search(line)
    if begins is None:
        return
    try:
        tree = ast.parse(line[begins.start() :].strip(), mode="eval").body
        yield from list(_of_call(tree, ""))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return


def _of_call(node: ast.expr, above: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        name = f"{above}{keyword.arg}"
        if isinstance(keyword.value, ast.Call):
            yield from _of_call(keyword.value, f"{name}.")
            continue
        try:
            yield name, ast.literal_eval(keyword.value)
        except ValueError:  # inf, or an object of its own
            continue


def _of_row(name: str, value: str) -> dict[str, Any]:
    if value == _NOTHING:
        return {name: None}
    if _CLASS.fullmatch(value):
        return {}
    try:
        return {name: ast.literal_eval(value)}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {name: value}
