"""Assignments of a shell script: texts, arrays, tables, and declarations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from autotune.core.shell.braces import brace_expanded
from autotune.core.shell.quotes import NotClosed
from autotune.core.shell.state import ShellState, Truth, unknown_word
from autotune.core.shell.unknown_texts import (
    UnknownText,
    UnknownTexts,
    expansion_in,
    has_own_default,
)
from autotune.core.shell.variable_values import (
    NAME,
    UNKNOWN,
    Value,
    Word,
    as_text,
    items_of,
    words_from,
)

_KEYED = re.compile(r"\[(?P<key>[^\]]*)\]=")
_ASSIGNED_TEXT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_SUBSCRIPT = re.compile(r"(?P<name>[A-Za-z_]\w*)\[(?P<index>.*)\]", re.DOTALL)


def assign(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> tuple[str, Value]:
    """Return the name and the new value, which takes effect."""
    target = _target(shell, node)
    value = _value(shell, node)
    _note_unknown(shell, node, value, certain)
    if not certain:
        value = _unknown(value, shell.source.line(node))
    subscript = _SUBSCRIPT.fullmatch(target)
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
    name = _SUBSCRIPT.sub(r"\g<name>", _target(shell, node))
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


def declare(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> None:
    """`export`, `local`, `declare`, `typeset` and `readonly`."""
    # 1. What is declared.
    keyword = node.children[0].type
    raws = [shell.source.raw(child) for child in node.named_children]
    flags = "".join(raw[1:] for raw in raws if raw.startswith("-"))
    exports = keyword == "export" or (keyword != "local" and "x" in flags)
    is_local = bool(shell.locals) and keyword in ("local", "declare", "typeset")
    is_local &= "g" not in flags

    # 2. The variables.
    for child in node.named_children:
        if child.type == "command_substitution":
            _assign_words(shell, shell.words_of(child), certain, exports=exports)
            continue
        name = _declared_name(shell, child)
        if not name:
            continue
        is_new = is_local and name not in shell.locals[-1]
        if is_local:
            shell.locals[-1].setdefault(name, shell.variables.get(name))
        if is_new and child.type == "variable_name":
            shell.variables.pop(name, None)
        _note_kinds(shell, name, flags)
        if child.type == "variable_assignment":
            _assign_declared(shell, child, certain)
        elif child.type != "variable_name":
            _assign_text(shell, child, certain)
        elif "A" in flags:
            shell.variables.setdefault(name, {})
        if "n" in flags and keyword != "export":
            _refer(shell, name)
        if exports and "n" in flags:
            shell.exported.discard(name)
        elif exports:
            shell.exported.add(name)


def declare_words(
    shell: ShellState,
    command_words: Sequence[Word],
    certain: bool,
) -> None:
    """`export A=1 B`, as words of a command."""
    keyword, *declared = command_words
    flags = "".join(word.text[1:] for word in declared if word.text.startswith("-"))
    exports = keyword.text == "export" or "x" in flags
    _assign_words(shell, declared, certain, exports=exports)


def _assign_words(
    shell: ShellState,
    declared: Sequence[Word],
    certain: bool,
    *,
    exports: bool,
) -> None:
    """Assign what words of a declaration say: `export $(cat file)`, `export "$PAIR"`."""
    for word in declared:
        match = _ASSIGNED_TEXT.fullmatch(word.text)
        if match is not None:
            set_variable(shell, match["name"], match["value"] if certain else UNKNOWN)
        elif UNKNOWN in word.text:
            line = shell.line_of_statement()
            shell.note(f"line {line}: what it declares decides nothing about the training")
        name = word.text if match is None else match["name"]
        if exports and NAME.fullmatch(name):
            shell.exported.add(name)


def _declared_name(
    shell: ShellState,
    node: Node,
) -> str:
    """Return the variable of one part of a declaration; empty for another part, such as `-x`."""
    if node.type == "variable_assignment":
        return _SUBSCRIPT.sub(r"\g<name>", _target(shell, node))
    if node.type == "variable_name":
        return shell.source.raw(node)
    match = _ASSIGNED_TEXT.fullmatch(shell.text_of(shell.source.raw(node)))
    return "" if match is None else match["name"]


def _assign_declared(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> None:
    """`export A={1,2}`, a word whose braces yield two assignments: the last one counts."""
    *_, last = brace_expanded(shell.source.raw(node))
    match = _ASSIGNED_TEXT.fullmatch(last)
    if match is None or last == shell.source.raw(node):
        assign(shell, node, certain)
        return
    value = shell.text_of(match["value"])
    set_variable(shell, match["name"], value if certain else UNKNOWN)


def _assign_text(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> None:
    """`declare "V_$N=3"`: the name is computed."""
    match = _ASSIGNED_TEXT.fullmatch(shell.text_of(shell.source.raw(node)))
    if match is not None:
        set_variable(shell, match["name"], match["value"] if certain else UNKNOWN)


def _note_kinds(
    shell: ShellState,
    name: str,
    flags: str,
) -> None:
    for letter in "ilu":
        if letter in flags:
            shell.kinds[name] = f"-{letter}"


def _refer(
    shell: ShellState,
    name: str,
) -> None:
    """`declare -n NAME=TARGET`: neither of the two is followed any further."""
    target = shell.expansion.text(name)
    if NAME.fullmatch(target):
        shell.references[name] = target
        shell.variables[target] = UNKNOWN
    shell.variables[name] = UNKNOWN


def unset(
    shell: ShellState,
    node: Node,
    certain: bool,
) -> Truth:
    """`unset NAME` and `unset NAME[2]`: a variable has no value any more."""
    texts = shell.source.raw(node).split()[1:]
    if "-f" in texts:
        for text in texts:
            shell.functions.pop(text, None)
        return True
    for text in texts:
        target = text.strip("'\"")
        subscript = _SUBSCRIPT.fullmatch(target)
        if subscript is None:
            shell.variables.pop(target, None)
            shell.exported.discard(target)
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


def _target(
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
    table = _table_of(before)
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
