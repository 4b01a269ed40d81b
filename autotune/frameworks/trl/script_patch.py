"""Exact edits of the keyword arguments of one call in a script; everything else stays as it is.

Values that are not literals, come through `**mapping` or are assigned later stay unchanged, and are
reported with the reason. The edited source is parsed again: a wrong edit is never returned.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.space import KnobValue
from autotune.core.text_diff import unified_diff


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


def patch_file(
    path: Path,
    call: Call,
    changes: Mapping[str, KnobValue],
) -> tuple[str, Mapping[str, str]]:
    """Return the diff, and the changes to make by hand with their reasons."""
    source = path.read_bytes()
    patched = patch(source, call, changes)
    before = source.decode("utf-8")
    after = patched.text.decode("utf-8")
    return unified_diff(before, after, path.name), patched.by_hand


def patch(
    source: bytes,
    call: Call,
    changes: Mapping[str, KnobValue],
) -> Patched:
    """Return the source with these keyword arguments in the call."""
    # 1. The call.
    try:
        tree = ast.parse(source)
        source.decode("utf-8")
    except (SyntaxError, ValueError) as error:
        return _unchanged(source, changes, f"the file cannot be read: {error}")
    node = _call_at(tree, call)
    if node is None:
        return _unchanged(source, changes, f"no such call was found in line {call.line}")
    # 2. Its possible edits.
    by_hand: dict[str, str] = {}
    possible: dict[str, KnobValue] = {}
    for name, value in changes.items():
        obstacle = _obstacle(node, name, value, call)
        if obstacle is None:
            possible[name] = value
        else:
            by_hand[name] = obstacle
    text = _Editor(source, node).edited(possible)
    # 3. A check of the result.
    if not _contains(text, node, possible):
        failed = dict.fromkeys(changes, "the call could not be edited safely")
        return Patched(text=source, by_hand={**failed, **by_hand})
    return Patched(text=text, by_hand=by_hand)


def _unchanged(
    source: bytes,
    changes: Mapping[str, KnobValue],
    reason: str,
) -> Patched:
    return Patched(text=source, by_hand=dict.fromkeys(changes, reason))


def _call_at(tree: ast.Module, call: Call) -> ast.Call | None:
    """Return the call with this span; without a span, the only call of a `...Config` in this
    line.
    """
    configs = []
    for node in _calls(tree):
        last_line = node.end_lineno or node.lineno
        if call.span is not None:
            if call.span == (node.lineno, last_line, node.col_offset, node.end_col_offset):
                return node
        elif node.lineno <= call.line <= last_line and _name_of(node).endswith("Config"):
            configs.append(node)
    return configs[0] if len(configs) == 1 else None


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name_of(call: ast.Call) -> str:
    name: str = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name


def _obstacle(
    node: ast.Call,
    name: str,
    value: object,
    call: Call,
) -> str | None:
    """Return the reason against editing this argument; None: it can be edited."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"Python has no plain value for {value}"
    if name in call.changed:
        return "it is assigned after the call"
    for keyword in node.keywords:
        if keyword.arg == name:
            if _is_literal(keyword.value):
                return None
            return f"it is given as {ast.unparse(keyword.value)}, which is no plain value"
    if name in call.expanded or "*" in call.expanded:
        return "it may come through the ** in the call"
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _contains(
    text: bytes,
    node: ast.Call,
    changes: Mapping[str, KnobValue],
) -> bool:
    """Return True if the edited call has these values."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    place = (node.lineno, node.col_offset)
    for call in _calls(tree):
        if (call.lineno, call.col_offset) != place or len(call.args) != len(node.args):
            continue
        if _has_values(call, changes):
            return True
    return False


def _has_values(call: ast.Call, changes: Mapping[str, KnobValue]) -> bool:
    values = {}
    for keyword in call.keywords:
        if _is_literal(keyword.value):
            values[keyword.arg] = ast.literal_eval(keyword.value)
    return all(name in values and values[name] == value for name, value in changes.items())


@dataclass(frozen=True)
class _Edit:
    """Replacement of source[begin:end]."""

    begin: int
    end: int
    text: bytes

    @classmethod
    def insertion(cls, offset: int, text: bytes) -> _Edit:
        return cls(offset, offset, text)


class _Editor:
    """Source of one call, addressed by offsets in bytes."""

    def __init__(self, source: bytes, node: ast.Call) -> None:
        self._source = source
        self._node = node
        # Beginnings of Python's lines: a form feed ends none.
        breaks = re.finditer(rb"\r\n|\n|\r", source)
        self._lines = [0, *(match.end() for match in breaks)]

    def edited(self, changes: Mapping[str, KnobValue]) -> bytes:
        """Return the source with the arguments replaced, or appended where they are new."""
        edits: list[_Edit] = []
        added = dict(changes)
        for keyword in self._node.keywords:
            if keyword.arg not in added:
                continue
            begin = self._begin(keyword.value)
            end = self._end(keyword.value)
            value = added.pop(keyword.arg)
            edits.append(_Edit(begin, end, repr(value).encode()))
        if added:
            edits.append(self._appended(added))
        # From the end to the beginning, so that offsets stay valid.
        edits.sort(key=lambda edit: edit.begin, reverse=True)
        text = self._source
        for edit in edits:
            text = text[: edit.begin] + edit.text + text[edit.end :]
        return text

    def _appended(self, added: Mapping[str, KnobValue]) -> _Edit:
        """Return an edit that appends arguments in the call's own style: inline, or one per
        line.
        """
        arguments = [f"{name}={value!r}".encode() for name, value in added.items()]
        inline = b", ".join(arguments)
        close = self._end(self._node) - 1
        # 1. A call without arguments.
        values = [*self._node.args, *(keyword.value for keyword in self._node.keywords)]
        if not values:
            return _Edit.insertion(close, inline)
        # 2. Arguments in one line, or behind others in a line.
        last = max(map(self._end, values))
        place, comma = self._behind(last, close)
        line_start = self._line_start(close)
        if line_start is None:
            if comma is None:
                return _Edit.insertion(place, b", " + inline)
            return _Edit.insertion(comma, b" " + inline + b",")
        # 3. Arguments in lines of their own.
        lines = b",".join(line_start + argument for argument in arguments)
        if comma is None:
            return _Edit.insertion(place, b"," + lines)
        return _Edit.insertion(self._end_of_line(comma, close), lines + b",")

    def _line_start(self, close: int) -> bytes | None:
        """Return line break and indentation before the last argument; None if it shares its line
        with something else.
        """
        nodes: list[ast.expr | ast.keyword] = [*self._node.args, *self._node.keywords]
        begin = max(map(self._begin, nodes))
        line = self._source.rfind(b"\n", 0, begin) + 1
        indent = self._source[line:begin]
        in_one_line = b"\n" not in self._source[self._begin(self._node) : close]
        if indent.strip() or line == 0 or in_one_line:
            return None
        if self._source[line - 2 : line] == b"\r\n":
            return b"\r\n" + indent
        return b"\n" + indent

    def _behind(self, last: int, close: int) -> tuple[int, int | None]:
        """Return the end of the last argument with its parentheses, and the end of its comma, if
        any.
        """
        place = offset = last
        comma = None
        while offset < close:
            letter = self._source[offset : offset + 1]
            if letter == b"#":
                offset = self._end_of_line(offset, close)
                continue
            if letter == b")":
                place = offset + 1
            elif letter == b",":
                comma = offset + 1
            offset += 1
        return place, comma

    def _end_of_line(self, offset: int, close: int) -> int:
        """Return the position before the line break; a comment stays with its argument."""
        stop = self._source.find(b"\n", offset, close)
        if stop < 0:
            return offset
        return stop - 1 if self._source[stop - 1 : stop] == b"\r" else stop

    def _begin(self, node: ast.expr | ast.keyword) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset
