"""Assignments of a shell script: texts, arrays, tables, and declarations."""

from __future__ import annotations

import re

from tree_sitter import Node

from autotune.core.shell_quotes import NotClosed
from autotune.core.shell_source import line_of
from autotune.core.shell_state import ShellState, Truth, unknown_word
from autotune.core.shell_unset import plain
from autotune.core.shell_values import UNKNOWN, Value, Word, items_of

_KEYED = re.compile(r"\[(?P<key>[^\]]*)\]=")
_SUBSCRIPT = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<index>.*)\]", re.DOTALL)


def assign(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> tuple[str, Value]:
    """Return the name and the new value, which takes effect."""
    target = _target(shell, node)
    value = _value(shell, node)
    if not certain:
        value = _unknown(value, node)
    subscript = _SUBSCRIPT.fullmatch(target)
    name = target
    if subscript is not None:
        name = subscript["name"]
        if isinstance(value, str):
            return name, _assign_item(shell, name, subscript["index"], value)
    is_added = any(child.type == "+=" for child in node.children)
    if is_added:
        before = shell.variables.get(name, "")
        value = _added(before, value)
    shell.variables[name] = value
    return name, value


def declare(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> None:
    """`export`, `local`, `declare`, `typeset` and `readonly`."""
    keyword = node.children[0].type
    flags = [shell.source.raw(child) for child in node.named_children]
    exports = keyword == "export" or (keyword != "local" and "-x" in flags)
    for child in node.named_children:
        if child.type == "variable_assignment":
            _remember_local(shell, keyword, _target(shell, child))
            name, value = assign(shell, child, certain)
            if "-i" in flags and isinstance(value, str):
                value = shell.expansion.computed(value)
                shell.variables[name] = value
            if exports:
                shell.exported[name] = as_text(value)
        elif child.type == "variable_name":
            name = shell.source.raw(child)
            _remember_local(shell, keyword, name)
            if exports and name in shell.variables:
                shell.exported[name] = as_text(shell.variables[name])
            elif "-A" in flags:
                shell.variables.setdefault(name, {})


def unset(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> Truth:
    """`unset NAME` and `unset NAME[2]`: a variable has no value any more."""
    texts = shell.source.raw(node).split()[1:]
    for text in texts:
        target = text.strip("'\"")
        subscript = _SUBSCRIPT.fullmatch(target)
        if subscript is None:
            shell.variables.pop(target, None)
            name = target
        else:
            name = subscript["name"]
            table = _table_of(shell.variables.get(name, []))
            table.pop(shell.expansion.joined(subscript["index"]), None)
            shell.variables[name] = table
        if not certain and not name.startswith("-"):
            shell.variables[name] = UNKNOWN
    return True


def _table_of(value: Value) -> dict[str, str]:
    """Return the items of an array by their places, or of a table by their keys."""
    if isinstance(value, dict):
        return dict(value)
    return {str(place): item.text for place, item in enumerate(items_of(value))}


def as_text(value: Value) -> str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return plain(" ".join(value.values()))
    return " ".join(word.text for word in value)


def _target(shell: ShellState, node: Node) -> str:
    name_node = node.child_by_field_name("name")
    if name_node is None:
        return ""
    return shell.source.raw(name_node)


def _remember_local(
    shell: ShellState,
    keyword: str,
    name: str,
) -> None:
    if shell.locals and keyword in ("local", "declare", "typeset"):
        before = shell.variables.get(name)
        shell.locals[-1].setdefault(name, before)


def _value(shell: ShellState, node: Node) -> Value:
    value_node = node.child_by_field_name("value")
    if value_node is None:
        return ""
    if value_node.type == "array":
        return _array(shell, value_node)
    try:
        return shell.expansion.assigned(shell.source.raw(value_node))
    except NotClosed:
        return UNKNOWN


def _array(shell: ShellState, node: Node) -> Value:
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
    table = _table_of(before)
    key = shell.expansion.joined(index)
    if is_number and not isinstance(before, dict):
        key = number
    table[key] = text
    shell.variables[name] = table
    return table


def _unknown(value: Value, node: Node) -> Value:
    """Return the value that an assignment has which a run may reach or not."""
    if isinstance(value, str):
        return UNKNOWN
    return [unknown_word(line_of(node))]


def _added(before: Value, value: Value) -> Value:
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
    return UNKNOWN
