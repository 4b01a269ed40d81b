"""Assignments of a shell script: texts, arrays, tables, and declarations."""

from __future__ import annotations

import re

from tree_sitter import Node

from autotune.core.shell.quotes import NotClosed
from autotune.core.shell.state import ShellState, unknown_word
from autotune.core.shell.unknown_texts import (
    UnknownText,
    UnknownTexts,
    expansion_in,
    has_own_default,
)
from autotune.core.shell.variable_values import (
    UNKNOWN,
    Value,
    Word,
    as_text,
    items_of,
    words_from,
)

_KEYED = re.compile(r"\[(?P<key>[^\]]*)\]=")
SUBSCRIPT = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<index>.*)\]", re.DOTALL)


def assign(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> tuple[str, Value]:
    """Return the name and the new value, which takes effect."""
    target = target_of(shell, node)
    value = _value(shell, node)
    _note_unknown(shell, node, value, certain)
    if not certain:
        value = _unknown(value, shell.source.line(node))
    subscript = SUBSCRIPT.fullmatch(target)
    name = target
    if subscript is not None:
        name = subscript["name"]
        if isinstance(value, str):
            return name, _assign_item(shell, name, subscript["index"], value)
    is_added = any(child.type == "+=" for child in node.children)
    return name, set_variable(shell, name, value, is_added=is_added)


def _note_unknown(
    shell: ShellState,
    node: Node,
    value: Value,
    certain: bool,
) -> None:
    """Note why the value of an assignment is not known, or that it is."""
    name = SUBSCRIPT.sub(r"\g<name>", target_of(shell, node))
    value_node = node.child_by_field_name("value")
    unknown = shell.expansion.unknown
    before: UnknownTexts = ()
    if any(child.type == "+=" for child in node.children):
        before = unknown.get(name, ())
    is_known = certain and UNKNOWN not in as_text(value)
    if value_node is None or is_known:
        unknown[name] = before
        return
    raw = shell.source.raw(value_node)
    needed: UnknownTexts = ()
    if UNKNOWN in as_text(value):
        needed = shell.expansion.why_unknown(raw)
    if needed in ((), (UnknownText(text=expansion_in(raw)),)):
        line = 0
        if shell.source is shell.main_source:
            line = shell.source.line(node)
        own_text = UnknownText(
            text=raw,
            variable=name,
            line=line,
            is_default=has_own_default(name, raw),
            is_certain=certain,
        )
        needed = (own_text,)
    unknown[name] = tuple(dict.fromkeys((*before, *needed)))


def set_variable(
    shell: ShellState,
    name: str,
    value: Value,
    *,
    is_added: bool = False,
) -> Value:
    """Give a variable a value, with what was declared of it, and return its new value."""
    before = shell.variables.get(name, "")
    kind = shell.kinds.get(name, "")
    if isinstance(value, str):
        if kind == "-i":
            value = shell.expansion.computed(f"({before})+({value})" if is_added else value)
            is_added = False
        elif kind:
            value = value.lower() if kind == "-l" else value.upper()
    if is_added:
        value = _added(before, value)
    elif isinstance(value, str) and not isinstance(before, str) and before:
        value = _with_first(before, value)
    if name in shell.references:
        shell.variables[shell.references[name]] = UNKNOWN
    if shell.exports_all or name in shell.inherited:
        shell.exported.add(name)
    shell.variables[name] = value
    return value


def _with_first(
    before: Value,
    text: str,
) -> Value:
    """Return an array after `A=text`, which assigns its first item."""
    if isinstance(before, dict):
        return {**before, "0": text}
    return [*words_from([text]), *items_of(before)[1:]]


def table_of(value: Value) -> dict[str, str]:
    """Return the items of an array by their places, or of a table by their keys."""
    if isinstance(value, dict):
        return dict(value)
    return {str(place): item.text for place, item in enumerate(items_of(value))}


def target_of(
    shell: ShellState,
    node: Node,
) -> str:
    name_node = node.child_by_field_name("name")
    if name_node is None:
        return ""
    return shell.source.raw(name_node)


def _value(
    shell: ShellState,
    node: Node,
) -> Value:
    value_node = node.child_by_field_name("value")
    if value_node is None:
        return ""
    if value_node.type == "array":
        return _array(shell, value_node)
    try:
        return shell.expansion.assigned(shell.source.raw(value_node))
    except NotClosed:
        return UNKNOWN


def _array(
    shell: ShellState,
    node: Node,
) -> Value:
    children = [child for child in node.named_children if child.type != "comment"]
    raws = [shell.source.raw(child) for child in children]
    keys = [_KEYED.match(raw) for raw in raws]
    if keys and all(keys):
        table: dict[str, str] = {}
        for raw, match in zip(raws, keys, strict=True):
            if match is not None:
                value = shell.text_of(raw[match.end() :])
                key = shell.text_of(match["key"])
                table[key] = value
        return table
    items: list[Word] = []
    for child in children:
        items += shell.words_of(child)
    return items


def _assign_item(
    shell: ShellState,
    name: str,
    index: str,
    text: str,
) -> Value:
    before = shell.variables.get(name, [])
    number = shell.expansion.arithmetic(index)
    is_number = number.isascii() and number.isdigit()
    if isinstance(before, list) and is_number:
        place = int(number)
        if place <= len(before):
            items = list(before)
            items[place : place + 1] = [
                Word(
                    text=text,
                    line=1,
                    span=None,
                )
            ]
            shell.variables[name] = items
            return items
    table = table_of(before)
    key = shell.expansion.joined(index)
    if is_number and not isinstance(before, dict):
        key = number
    table[key] = text
    shell.variables[name] = table
    return table


def _unknown(
    value: Value,
    line: int,
) -> Value:
    """Return the value that an assignment has which a run may reach or not."""
    if isinstance(value, str):
        return UNKNOWN
    return [unknown_word(line)]


def _added(
    before: Value,
    value: Value,
) -> Value:
    """Return the value after `+=`."""
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **value}
    if isinstance(value, list):
        if isinstance(before, (list, dict)):
            return [*items_of(before), *value]
        if isinstance(before, str) and before:
            first = Word(
                text=before,
                line=1,
                span=None,
            )
            return [first, *value]
        return list(value)
    if isinstance(before, str) and isinstance(value, str):
        return before + value
    if isinstance(before, list) and isinstance(value, str):
        first_text = before[0].text if before else ""
        return _with_first(before, f"{first_text}{value}")
    return UNKNOWN
