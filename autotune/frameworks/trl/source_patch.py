"""Patch of the user's own file: exact edits of one call's keyword arguments.

Values that are not literals, come through `**mapping` or are assigned later stay unchanged, and
are reported with the reason.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.space import KnobValue
from autotune.frameworks.launch_edit import unified_diff
from autotune.frameworks.trl.source_calls import call_at

Changes = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call to edit."""

    line: int
    span: tuple[int, int, int, int] | None
    expanded: tuple[str, ...] = ()  # names from its `**mapping`; `*` for unknown names
    changed: tuple[str, ...] = ()  # names that are assigned after the call


@dataclass(frozen=True, kw_only=True)
class Patched:
    """Source with the possible changes."""

    text: bytes
    by_hand: Mapping[str, str]  # impossible change -> reason


def patch(source: bytes, call: Call, changes: Changes) -> Patched:
    """Return the source with these keyword arguments in the call."""
    try:
        tree = ast.parse(source)
        source.decode("utf-8")
    except (SyntaxError, ValueError) as error:
        return Patched(text=source, by_hand=dict.fromkeys(changes, f"the file cannot be read: {error}"))
    node = call_at(tree, call.line, call.span)
    if node is None:
        return Patched(text=source, by_hand=dict.fromkeys(changes, f"no such call was found in line {call.line}"))
    by_hand = {name: why for name, value in changes.items() if (why := _why_not(node, name, value, call)) is not None}
    wanted = {name: value for name, value in changes.items() if name not in by_hand}
    text = _edited(source, node, wanted)
    if not _contains(text, node, wanted):
        return Patched(text=source, by_hand={**dict.fromkeys(changes, "the call could not be edited safely"), **by_hand})
    return Patched(text=text, by_hand=by_hand)


def patch_file(path: Path, call: Call, changes: Changes) -> tuple[str, Mapping[str, str]]:
    """Return the diff, and the changes to make by hand with their reasons."""
    source = path.read_bytes()
    patched = patch(source, call, changes)
    return unified_diff(source.decode("utf-8"), patched.text.decode("utf-8"), path.name), patched.by_hand


def _why_not(node: ast.Call, name: str, value: object, call: Call) -> str | None:
    """Return the reason against editing this argument; None: it can be edited."""
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
    """Applied from the end to the beginning, so that positions stay valid."""
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\n|\r", source))]  # of Python's lines: a form feed ends none
    edits: list[tuple[int, int, bytes]] = []
    added = dict(changes)
    for keyword in node.keywords:
        if keyword.arg in added:
            begin, end = _begin(starts, keyword.value), _end(starts, keyword.value)
            edits.append((begin, end, repr(added.pop(keyword.arg)).encode()))
    if added:
        edits.append(_insertion(source, starts, node, added))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


def _insertion(source: bytes, starts: list[int], node: ast.Call, added: Changes) -> tuple[int, int, bytes]:
    """Return an edit that appends arguments in the call's own style: inline, or one per line."""
    words = [f"{name}={value!r}".encode() for name, value in added.items()]
    close = _end(starts, node) - 1
    last = max((_end(starts, one) for one in (*node.args, *(k.value for k in node.keywords))), default=None)
    if last is None:
        return close, close, b", ".join(words)
    place, comma = _behind(source, last, close)
    given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
    begin = max(_begin(starts, one) for one in given)
    line = source.rfind(b"\n", 0, begin) + 1
    indent = source[line:begin]
    if indent.strip() or line == 0 or source.count(b"\n", _begin(starts, node), close) == 0:
        text = b", ".join(words)
        return (comma, comma, b" " + text + b",") if comma is not None else (place, place, b", " + text)
    newline = b"\r\n" if source[line - 2 : line] == b"\r\n" else b"\n"
    if comma is None:
        return place, place, b"," + b",".join(newline + indent + word for word in words)
    stop = _end_of_line(source, comma, close)
    return stop, stop, b"".join(newline + indent + word + b"," for word in words)


def _behind(source: bytes, last: int, close: int) -> tuple[int, int | None]:
    """Return the end of the last argument with its parentheses, and the end of its comma, if any."""
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
    """Return the position before the line break; a comment stays with its argument."""
    stop = source.find(b"\n", at, close)
    if stop < 0:
        return at
    return stop - 1 if source[stop - 1 : stop] == b"\r" else stop


def _contains(text: bytes, node: ast.Call, changes: Changes) -> bool:
    """Return True if the edited call has these values: a wrong edit is never returned."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    for call in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
        if (call.lineno, call.col_offset, len(call.args)) == (node.lineno, node.col_offset, len(node.args)):
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if _is_literal(keyword.value)}
            if all(name in given and given[name] == value for name, value in changes.items()):
                return True
    return False


def _begin(starts: list[int], node: ast.expr | ast.keyword) -> int:
    return starts[node.lineno - 1] + node.col_offset


def _end(starts: list[int], node: ast.expr) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset
