"""Rows of datasets that cannot be read here: placeholders, which the script may map and filter.

A script that is only inspected needs no rows: the prediction is for the longest ones.
"""

from __future__ import annotations

import builtins
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..tracing.patching import attribute

PLACEHOLDER_ROWS = 1000  # stated length of a placeholder
LISTED_ROWS = 8  # rows of an iteration

ROW_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet")

# Functions of `datasets` that read rows, and those that join several datasets.
ROW_READERS = ("load_dataset", "load_from_disk")
JOINERS = ("concatenate_datasets", "interleave_datasets")


class PlaceholderText(str):
    """Content of any column: each part of it is such a text again."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        yield self

    def split(self, *_: Any, **__: Any) -> Any:
        return _Parts([self])

    splitlines = rsplit = split

    def get(self, *_: Any) -> Any:
        return self


class _Parts(list[Any]):
    """List with something at every index."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0 if isinstance(index, int) else index)


TEXT = PlaceholderText("0")


class _Row(dict[str, Any]):
    """Row with every column."""

    def __missing__(self, key: str) -> Any:
        return TEXT

    def __contains__(self, key: object) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


USUAL_COLUMNS = (
    "prompt",
    "completion",
    "messages",
    "text",
    "chosen",
    "rejected",
    "label",
    "question",
    "answer",
    "problem",
    "solution",
)


class _Columns(list[str]):
    """Names of columns: the usual ones are listed, and each other is there as well."""

    def __contains__(self, name: object) -> bool:
        return True


class PlaceholderRows:
    """Dataset, or mapping of splits, with every column: each change of it returns the same."""

    column_names = features = _Columns(USUAL_COLUMNS)
    num_rows = PLACEHOLDER_ROWS

    def __len__(self) -> int:
        return PLACEHOLDER_ROWS

    def __iter__(self) -> Iterator[Any]:
        for _ in range(LISTED_ROWS):
            yield _Row()

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return _Row() if isinstance(key, int) else self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing: a split stays a placeholder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._same

    def _same(self, *_: Any, **__: Any) -> PlaceholderRows:
        return self

    def keys(self) -> tuple[str, ...]:
        return ("train", "test")

    def items(self) -> list[tuple[str, PlaceholderRows]]:
        return [(split, self) for split in self.keys()]


class _PlaceholderFile(io.StringIO):
    """File of rows that is not here: each line, and the whole, stands for rows."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(LISTED_ROWS):
            yield TEXT

    def read(self, *_: Any) -> Any:
        return TEXT

    def readlines(self, *_: Any) -> list[Any]:
        return list(self)


def _opener(
    open_file: Callable[..., Any],
    is_library: Callable[[str], bool],
    report: Callable[[str, str], None],
) -> Callable[..., Any]:
    """Return `open` that gives the user's files placeholders for absent rows."""

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        try:
            return open_file(file, mode, *args, **options)
        except FileNotFoundError:
            is_of_user = not is_library(sys._getframe(1).f_code.co_filename)
            if not is_of_user or mode not in ("r", "rt") or not str(file).endswith(ROW_FILES):
                raise
            report("dataset", str(file))
            return _PlaceholderFile()

    return opened


def _decoded(
    decode: Callable[..., Any],
    one_row: Callable[[Any], bool],
) -> Callable[..., Any]:
    """Return `json.load` or `json.loads` that reads placeholders as rows."""

    @functools.wraps(decode)
    def decoded(source: Any, *args: Any, **options: Any) -> Any:
        if isinstance(source, _PlaceholderFile):
            return [_Row() for _ in range(LISTED_ROWS)]
        return _Row() if one_row(source) else decode(source, *args, **options)

    return decoded


@contextmanager
def own_files(
    is_library: Callable[[str], bool],
    report: Callable[[str, str], None],
) -> Iterator[None]:
    """Replace files of rows that the user's own code opens, and that are not here."""
    opened = _opener(builtins.open, is_library, report)
    with ExitStack() as stack:
        stack.enter_context(attribute(builtins, "open", opened))
        for name in ("load", "loads"):
            decoded = _decoded(getattr(json, name), lambda text: isinstance(text, PlaceholderText))
            stack.enter_context(attribute(json, name, decoded))
        yield


@contextmanager
def placeholders(report: Callable[[str, str], None]) -> Iterator[None]:
    """Replace datasets that cannot be read; `report` gets the kind of the part and its name."""
    import datasets

    with ExitStack() as stack:
        for name in ROW_READERS:
            read = _reader(getattr(datasets, name), report)
            stack.enter_context(attribute(datasets, name, read))
        for name in JOINERS:
            joined = _joiner(getattr(datasets, name))
            stack.enter_context(attribute(datasets, name, joined))
        yield


def _reader(read: Callable[..., Any], report: Callable[[str, str], None]) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_or_replaced(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except (OSError, TimeoutError):  # no network, no such file or dataset
            path = args or (options.get("path"),)
            name = options.get("data_files") or path[0]
            report("dataset", str(name))
            return PlaceholderRows()

    return read_or_replaced


def _joiner(join: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(join)
    def joined(parts: Any, *args: Any, **options: Any) -> Any:
        parts = list(parts)
        for part in parts:
            if isinstance(part, PlaceholderRows):
                return part
        return join(parts, *args, **options)

    return joined
