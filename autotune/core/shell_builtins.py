"""Commands that bash itself does: `shift`, `set --`, `cd`, `read`, `getopts`, `exec`, `exit`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tree_sitter import Node

from autotune.core.shell_state import (
    FunctionEnd,
    LoopEnd,
    ScriptEnd,
    ShellState,
    SimpleCommand,
    Truth,
    end_of,
    unknown_word,
)
from autotune.core.shell_tests import test_outcome
from autotune.core.shell_values import NAME, UNKNOWN, Word


@dataclass(frozen=True, kw_only=True)
class BuiltInCall:
    """Words of the command, its name first, and the nodes that may hold its input."""

    words: Sequence[Word]
    certain: bool
    inputs: Sequence[Node]

    @property
    def name(self) -> str:
        return self.words[0].text

    @property
    def arguments(self) -> list[str]:
        return [word.text for word in self.words[1:]]


BuiltIn = Callable[[ShellState, BuiltInCall], Truth]


def _shift(shell: ShellState, call: BuiltInCall) -> Truth:
    count = "1"
    if call.arguments:
        count = call.arguments[0]
    is_number = count.isascii() and count.isdigit()
    arguments = shell.expansion.arguments
    if not call.certain or not is_number:
        shell.expansion.arguments = [UNKNOWN] * len(arguments)
        return None
    if int(count) > len(arguments):
        return False
    shell.expansion.arguments = arguments[int(count) :]
    return True


def _set_arguments(shell: ShellState, call: BuiltInCall) -> Truth:
    texts = call.arguments
    if "--" in texts:
        separator = texts.index("--")
        shell.expansion.arguments = texts[separator + 1 :]
    return True


def _change_folder(shell: ShellState, call: BuiltInCall) -> Truth:
    folders = [argument for argument in call.arguments if not argument.startswith("-")]
    target = folders[0] if folders else shell.expansion.text("HOME")
    before = shell.expansion.text("PWD")
    folder = os.path.normpath(os.path.join(before, target))  # noqa: PTH118
    is_known = call.certain and UNKNOWN not in folder
    shell.variables["PWD"] = folder if is_known else UNKNOWN
    return True


def _read(shell: ShellState, call: BuiltInCall) -> Truth:
    """`read -r -d '' NAME <<EOF` and `read A B <<< TEXT`."""
    names = [argument for argument in call.arguments if NAME.fullmatch(argument)]
    text = _input(shell, call.inputs) if call.certain else None
    if text is None:
        for name in names:
            shell.variables[name] = UNKNOWN
        return None
    parts = [text]
    if len(names) != 1:
        max_splits = max(0, len(names) - 1)
        parts = text.split(None, max_splits)
    for index, name in enumerate(names):
        part = parts[index] if index < len(parts) else ""
        shell.variables[name] = part.strip()
    return True


def _input(shell: ShellState, inputs: Sequence[Node]) -> str | None:
    """Return the here-document or here-string of a command."""
    for node in inputs:
        if node.type == "herestring_redirect" and node.named_children:
            return shell.text_of(shell.source.raw(node.named_children[-1]))
        if node.type == "heredoc_redirect":
            return _here_document(shell, node)
    return None


def _here_document(shell: ShellState, node: Node) -> str:
    parts = {child.type: child for child in node.named_children}
    if "heredoc_start" not in parts or "heredoc_body" not in parts:
        return ""
    body = shell.source.raw(parts["heredoc_body"])
    mark = shell.source.raw(parts["heredoc_start"])
    if re.search(r"['\"\\]", mark):
        return body
    quoted = body.replace("\\\n", " ").replace('"', '\\"')
    return shell.text_of(f'"{quoted}"')


def _get_option(shell: ShellState, call: BuiltInCall) -> Truth:
    """`getopts OPTIONS NAME`: the next option among the arguments."""
    if not call.certain or len(call.arguments) < 2:
        return None
    options, name = call.arguments[:2]
    arguments = shell.expansion.arguments
    index = shell.option_number - 1
    argument = arguments[index] if index < len(arguments) else ""
    is_option = len(argument) > 1 and argument.startswith("-") and argument != "--"
    if not is_option:
        shell.variables[name] = "?"
        return False
    letter = argument[shell.option_offset]
    remainder = argument[shell.option_offset + 1 :]
    shell.option_offset += 1
    if f"{letter}:" in options:
        shell.variables["OPTARG"] = remainder
        if not remainder:
            shell.option_number += 1
            following = arguments[index + 1 : index + 2]
            shell.variables["OPTARG"] = following[0] if following else ""
        remainder = ""
    if not remainder:
        shell.option_number += 1
        shell.option_offset = 1
    shell.variables["OPTIND"] = str(shell.option_number)
    is_listed = letter in options.replace(":", "")
    shell.variables[name] = letter if is_listed else "?"
    return True


def _prefixed(shell: ShellState, call: BuiltInCall) -> Truth:
    """`exec`, `command` and `builtin`: the command behind it."""
    remainder = tuple(call.words[1:])
    if not remainder or remainder[0].text.startswith("-"):
        return None
    command = SimpleCommand(
        words=remainder,
        environment=dict(shell.exported),
        line=call.words[0].line,
        end=end_of(call.words),
        certain=call.certain,
        folder=shell.folder,
    )
    shell.commands.append(command)
    if call.name == "exec" and call.certain:
        raise ScriptEnd
    return True


def _leave(shell: ShellState, call: BuiltInCall) -> Truth:
    """`exit`, `return`, `break` and `continue`."""
    if not call.certain:
        return None
    match call.name:
        case "exit" if call.arguments and call.arguments[0].strip("0"):
            return None  # a check that failed: what a run that passes it does is read
        case "exit":
            raise ScriptEnd
        case "return":
            raise FunctionEnd
        case name:
            raise LoopEnd(goes_on=name == "continue")


def _test(shell: ShellState, call: BuiltInCall) -> Truth:
    return test_outcome([(argument, True) for argument in call.arguments])


def _read_lines(shell: ShellState, call: BuiltInCall) -> Truth:
    """`mapfile` and `readarray`: lines that only a run has."""
    name = call.words[-1].text
    if NAME.fullmatch(name):
        shell.variables[name] = [unknown_word(call.words[0].line)]
    return None


def _true(shell: ShellState, call: BuiltInCall) -> Truth:
    return True


def _false(shell: ShellState, call: BuiltInCall) -> Truth:
    return False


BUILT_INS: Mapping[str, BuiltIn] = {
    "shift": _shift,
    "set": _set_arguments,
    "cd": _change_folder,
    "pushd": _change_folder,
    "read": _read,
    "getopts": _get_option,
    "exec": _prefixed,
    "command": _prefixed,
    "builtin": _prefixed,
    "exit": _leave,
    "return": _leave,
    "break": _leave,
    "continue": _leave,
    "test": _test,
    "mapfile": _read_lines,
    "readarray": _read_lines,
    ":": _true,
    "true": _true,
    "false": _false,
}
"""Name -> what bash does; `eval` is the interpreter's."""
