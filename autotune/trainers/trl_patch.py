"""The recommendation as a change of the user's own file: exact edits of one call's keyword arguments, and nothing else moves.

What can't be changed so, because the value is no literal, comes through `**mapping` or is assigned later, is told with its
reason, and stays as it is in the file.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.candidate import KnobValue
from autotune.trainers.trl_calls import call_at

Changes = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The call whose keyword arguments are to change."""

    line: int
    span: tuple[int, int, int, int] | None
    expanded: tuple[str, ...] = ()
    """Names that come out of its `**mapping`; `*` for names that nobody can tell."""

    changed: tuple[str, ...] = ()
    """Names that are assigned after it."""


@dataclass(frozen=True, kw_only=True)
class Patched:
    """A source with the changes in it, as far as they can be made."""

    text: bytes
    by_hand: Mapping[str, str]
    """The others: name -> why."""

    def diff(self, before: bytes, name: str) -> str:
        """As `patch -p1` takes it; empty where nothing changed."""
        old, new = (text.decode("utf-8").splitlines(keepends=True) for text in (before, self.text))
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def patch(source: bytes, call: Call, changes: Changes) -> Patched:
    """The source with these keyword arguments in that call."""
    try:
        tree = ast.parse(source)
        source.decode("utf-8")
    except (SyntaxError, ValueError) as error:
        return Patched(text=source, by_hand=dict.fromkeys(changes, f"the file can't be read: {error}"))
    node = call_at(tree, call.line, call.span)
    if node is None:
        return Patched(text=source, by_hand=dict.fromkeys(changes, f"no such call was found in line {call.line}"))
    by_hand = {name: why for name, value in changes.items() if (why := _why_not(node, name, value, call)) is not None}
    wanted = {name: value for name, value in changes.items() if name not in by_hand}
    text = _edited(source, node, wanted)
    if not _says(text, node, wanted):
        return Patched(text=source, by_hand={**dict.fromkeys(changes, "the call could not be edited safely"), **by_hand})
    return Patched(text=text, by_hand=by_hand)


def patch_file(path: Path, call: Call, changes: Changes) -> tuple[str, Mapping[str, str]]:
    """The diff, and what is left to do by hand."""
    source = path.read_bytes()
    patched = patch(source, call, changes)
    return patched.diff(source, path.name), patched.by_hand


def _why_not(node: ast.Call, name: str, value: object, call: Call) -> str | None:
    """Why this argument can't be changed in the call itself."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"Python has no plain value for {value}"
    if name in call.changed:
        return "it is assigned after the call"
    keyword = next((one for one in node.keywords if one.arg == name), None)
    if keyword is not None:
        return None if _is_literal(keyword.value) else f"it is given as {ast.unparse(keyword.value)}, which is no plain value"
    return "it may come through the ** in the call" if name in call.expanded or "*" in call.expanded else None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _edited(source: bytes, node: ast.Call, changes: Changes) -> bytes:
    """From the end to the beginning, so that what is edited later has not moved."""
    starts = _line_starts(source)
    edits: list[tuple[int, int, bytes]] = []
    added = dict(changes)
    for keyword in node.keywords:
        if keyword.arg in added:
            value = keyword.value
            begin, end = _at(starts, value.lineno, value.col_offset), _at(starts, value.end_lineno, value.end_col_offset)
            edits.append((begin, end, repr(added.pop(keyword.arg)).encode()))
    if added:
        edits.append(_insertion(source, starts, node, added))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


def _insertion(source: bytes, starts: list[int], node: ast.Call, added: Changes) -> tuple[int, int, bytes]:
    """New arguments behind the last one, in the call's own style: a line each where the others have one."""
    words = [f"{name}={value!r}".encode() for name, value in added.items()]
    close = _at(starts, node.end_lineno, node.end_col_offset) - 1
    last = max((_end(starts, one) for one in (*node.args, *(k.value for k in node.keywords))), default=None)
    if last is None:
        return close, close, b", ".join(words)
    place, comma = _behind(source, last, close)
    given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    begin = max(_begin(starts, one) for one in given)
    line = source.rfind(b"\n", 0, begin) + 1
    indent = source[line:begin]
    if indent.strip() or line == 0 or source.count(b"\n", _at(starts, node.lineno, node.col_offset), close) == 0:
        text = b", ".join(words)
        return (comma, comma, b" " + text + b",") if comma is not None else (place, place, b", " + text)
    newline = b"\r\n" if source[line - 2 : line] == b"\r\n" else b"\n"
    if comma is None:
        return place, place, b"," + b",".join(newline + indent + word for word in words)
    stop = _end_of_line(source, comma, close)
    return stop, stop, b"".join(newline + indent + word + b"," for word in words)


def _behind(source: bytes, last: int, close: int) -> tuple[int, int | None]:
    """Where the last argument really ends, parentheses around it included, and behind its comma, where it has one."""
    place, comma, at = last, None, last
    while at < close:
        letter = source[at : at + 1]
        if letter == b"#":
            at = _end_of_line(source, at, close)
            continue
        if letter == b")":
            place = at + 1
        elif letter == b",":
            comma = at + 1
        at += 1
    return place, comma


def _end_of_line(source: bytes, at: int, close: int) -> int:
    """Before the line break, and before the carriage return where there is one; a comment stays with its argument."""
    stop = source.find(b"\n", at, close)
    if stop < 0:
        return at
    return stop - 1 if source[stop - 1 : stop] == b"\r" else stop


def _says(text: bytes, node: ast.Call, changes: Changes) -> bool:
    """Whether the edited file has the call at the same beginning with these values: an edit that went wrong is not handed out."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    same = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and (one.lineno, one.col_offset) == (node.lineno, node.col_offset)
    ]
    return any(_has(one, changes) and len(one.args) == len(node.args) for one in same)


def _has(call: ast.Call, changes: Changes) -> bool:
    said = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return all(name in said and _is_literal(said[name]) and ast.literal_eval(said[name]) == changes[name] for name in changes)


def _line_starts(source: bytes) -> list[int]:
    """As Python counts lines: a form feed or an exotic separator ends none."""
    starts = [0]
    for at in _breaks(source):
        starts.append(at)
    return starts


def _breaks(source: bytes) -> Iterator[int]:
    at = 0
    while at < len(source):
        if source[at : at + 2] == b"\r\n":
            at += 2
        elif source[at : at + 1] in (b"\n", b"\r"):
            at += 1
        else:
            at += 1
            continue
        yield at


def _at(starts: list[int], line: int | None, column: int | None) -> int:
    assert line is not None and column is not None
    return starts[line - 1] + column


def _end(starts: list[int], node: ast.expr) -> int:
    return _at(starts, node.end_lineno, node.end_col_offset)


def _begin(starts: list[int], node: ast.expr | ast.keyword) -> int:
    return _at(starts, node.lineno, node.col_offset)
