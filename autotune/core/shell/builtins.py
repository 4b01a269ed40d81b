"""Commands that bash itself does, by name: `cd`, `exit`, `test`, `let`, `printf`, `trap`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from autotune.core.shell import argument_builtins, reading_builtins
from autotune.core.shell.builtin_call import BuiltIn, BuiltInCall
from autotune.core.shell.printf_formats import printed_text
from autotune.core.shell.program_lookup import hash_knows, type_prints, which_prints
from autotune.core.shell.state import (
    FunctionEnd,
    LoopEnd,
    ScriptEnd,
    ShellState,
    Truth,
)
from autotune.core.shell.tests import Surroundings, arithmetic_outcome, test_outcome
from autotune.core.shell.variable_values import UNKNOWN


def _change_folder(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    folders = [argument for argument in call.arguments if not argument.startswith("-")]
    target = folders[0] if folders else shell.expansion.text("HOME")
    before = shell.expansion.text("PWD")
    if call.name == "pushd":
        shell.former_folders.append(before)
    if call.arguments == ["-"]:
        target = shell.expansion.text("OLDPWD")
    _set_folder(shell, os.path.join(before, target), call.certain)  # noqa: PTH118
    return True


def _return_to_folder(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`popd`."""
    folder = shell.former_folders.pop() if shell.former_folders else UNKNOWN
    _set_folder(shell, folder, call.certain)
    return True


def _set_folder(
    shell: ShellState,
    folder: str,
    certain: bool,
) -> None:
    is_known = certain and UNKNOWN not in folder
    shell.variables["OLDPWD"] = shell.variables.get("PWD", UNKNOWN)
    shell.variables["PWD"] = os.path.normpath(folder) if is_known else UNKNOWN


def _leave(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`exit`, `return`, `break` and `continue`."""
    if not call.certain:
        shell.may_have_returned |= call.name == "return"
        return None
    match call.name:
        case "exit" if call.arguments and call.arguments[0].strip("0"):
            # A check that failed: what a run that passes it does is read.
            line = call.words[0].line
            shell.note(f"line {line} is not reached. Here it is, and `exit` ends the script")
            return None
        case "exit":
            raise ScriptEnd(True)
        case "return" if not shell.locals and not shell.sourced:
            return False  # bash says that there is nothing to return from, and goes on
        case "return":
            if call.arguments:
                shell.expansion.last_status = _number_of_status(call.arguments[0])
            raise FunctionEnd(_status_of(call.arguments))
        case name:
            levels = "".join(call.arguments[:1])
            is_number = levels.isascii() and levels.isdigit()
            raise LoopEnd(goes_on=name == "continue", levels=int(levels) if is_number else 1)


def _number_of_status(text: str) -> str:
    is_number = text.isascii() and text.isdigit()
    if not is_number:
        return UNKNOWN
    return str(int(text) % 256)


def _status_of(arguments: Sequence[str]) -> Truth:
    """Return the result that `return NUMBER` gives a function."""
    if not arguments or not arguments[0].isdigit():
        return None
    return not arguments[0].strip("0")


def _test(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    tokens = [(argument, True) for argument in call.arguments]
    return test_outcome(tokens, surroundings_of(shell))


def surroundings_of(shell: ShellState) -> Surroundings:
    """Return what a test looks at."""
    return Surroundings(
        folder=shell.folder,
        files=shell.files,
        is_set=shell.expansion.is_set,
    )


_ASSIGNED_BY_TRAP = re.compile(r"(?:^|[\s;&|(])([A-Za-z_]\w*)\+?=")


def _trap(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`trap COMMANDS EXIT`. Those of signals are not reached; what those of ERR and DEBUG assign
    is not known.
    """
    arguments = [argument for argument in call.arguments if argument != "--"]
    if not {"ERR", "DEBUG", "RETURN"}.isdisjoint(arguments[1:]):
        for name in _ASSIGNED_BY_TRAP.findall(arguments[0]):
            shell.variables[name] = UNKNOWN
    if len(arguments) > 1 and {"EXIT", "0"} & {*arguments[1:]}:
        is_kept = call.certain and UNKNOWN not in arguments[0] and arguments[0] != "-"
        shell.exit_trap = arguments[0] if is_kept else ""
    return True


def _choose_options(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`shopt -s nullglob`."""
    names = {argument for argument in call.arguments if not argument.startswith("-")}
    if not call.certain:
        return None
    if "-s" in call.arguments:
        shell.options |= names
    elif "-u" in call.arguments:
        shell.options -= names
    else:
        return None
    return True


def _name_aliases(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`alias run='torchrun train.py'`."""
    for argument in call.arguments:
        name, is_defined, text = argument.partition("=")
        if is_defined and call.certain:
            shell.aliases[name] = text
    return True


def _let(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`let N=2*3`: the value of the last expression."""
    outcome: Truth = None
    for argument in call.arguments:
        outcome = arithmetic_outcome(argument, shell.expansion, certain=call.certain)
    return outcome


def _print(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`printf -v NAME TEMPLATE VALUES` assigns what it would print."""
    arguments = call.arguments
    if arguments[:1] == ["-v"] and len(arguments) > 2:
        printed = printed_text(arguments[2], arguments[3:])
        if printed is None or not call.certain:
            printed = UNKNOWN
        shell.variables[arguments[1]] = printed
    elif arguments:
        printed = None
        if UNKNOWN not in "".join(arguments):
            printed = printed_text(arguments[0], arguments[1:])
        if printed is None:
            printed = UNKNOWN
        shell.emit(printed)
    return True


def _look_up(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`type NAME`, `hash NAME` and `which NAME`."""
    match call.name:
        case "type":
            return type_prints(shell, call.arguments, call.certain)
        case "hash":
            return hash_knows(shell, call.arguments, call.certain)
        case _:
            names = [argument for argument in call.arguments if not argument.startswith("-")]
            return which_prints(shell, names, call.certain)


def _true(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    return True


def _false(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    return False


BUILT_INS: Mapping[str, BuiltIn] = {
    "shift": argument_builtins.shift,
    "set": argument_builtins.set_arguments,
    "cd": _change_folder,
    "pushd": _change_folder,
    "popd": _return_to_folder,
    "read": reading_builtins.read,
    "getopts": argument_builtins.get_option,
    "exit": _leave,
    "return": _leave,
    "break": _leave,
    "continue": _leave,
    "test": _test,
    "let": _let,
    "printf": _print,
    "trap": _trap,
    "shopt": _choose_options,
    "alias": _name_aliases,
    "mapfile": reading_builtins.read_lines,
    "readarray": reading_builtins.read_lines,
    "type": _look_up,
    "hash": _look_up,
    "which": _look_up,
    "wait": _true,
    "disown": _true,
    "umask": _true,
    "ulimit": _true,
    "enable": _true,
    ":": _true,
    "true": _true,
    "false": _false,
}
"""Name -> what bash does; `eval` is the interpreter's."""
