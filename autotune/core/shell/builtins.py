"""Commands that bash itself does: `shift`, `set --`, `cd`, `read`, `getopts`, `exec`, `exit`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.core.shell.filters import printed_text
from autotune.core.shell.state import (
    FunctionEnd,
    LoopEnd,
    ScriptEnd,
    ShellState,
    Truth,
    unknown_word,
)
from autotune.core.shell.tests import Surroundings, arithmetic_outcome, test_outcome
from autotune.core.shell.variable_values import BLANKS, NAME, UNKNOWN, Word, fields_of, words_from


@dataclass(frozen=True, kw_only=True)
class BuiltInCall:
    """Words of the command, its name first."""

    words: Sequence[Word]
    certain: bool
    settings: Mapping[str, str] = field(default_factory=dict)  # before it: `IFS=, read A`

    @property
    def name(self) -> str:
        return self.words[0].text

    @property
    def arguments(self) -> list[str]:
        return [word.text for word in self.words[1:]]


BuiltIn = Callable[[ShellState, BuiltInCall], Truth]


def _shift(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
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


def _set_arguments(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`set -- A B`, `set A B`, and options such as `set -e`."""
    texts = call.arguments
    while texts and texts[0][:1] in ("-", "+"):
        option, *texts = texts
        if option in ("-", "--"):
            break
        name = ""
        if option.endswith("o") and texts:
            name, *texts = texts
        _set_options(shell, option, name)
    else:
        if not texts:
            return True
    shell.expansion.arguments = texts if call.certain else [UNKNOWN]
    return True


def _set_options(
    shell: ShellState,
    option: str,
    name: str,
) -> None:
    """`set -eu`, `set +e` and `set -o pipefail`."""
    is_on = option.startswith("-")
    if "a" in option or name == "allexport":
        shell.exports_all = is_on
    if "e" in option or name == "errexit":
        shell.stops_at_failures = is_on
    if "u" in option or name == "nounset":
        shell.stops_at_unset = is_on
    if name == "pipefail":
        shell.stops_at_failed_pipes = is_on
    if "f" in option or name == "noglob":
        shell.options -= {"noglob"}
        if is_on:
            shell.options |= {"noglob"}


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


_READ_VALUES = "adinNptu"  # options of `read` that have a value


def _read(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`read -r -d '' NAME <<EOF`, `read A B <<< TEXT` and `IFS=, read -ra LIST <<< TEXT`."""
    # 1. Options and names.
    values: dict[str, str] = {}
    names: list[str] = []
    arguments = iter(call.arguments)
    for argument in arguments:
        if not argument.startswith("-"):
            names.append(argument)
        elif argument[-1:] in _READ_VALUES:
            values[argument[-1]] = next(arguments, "")
    array = values.get("a")

    # 2. The text, of which one line is read unless `-d` says otherwise.
    text = _next_text(shell, reads_all="d" in values)
    is_ended = False
    if text is not None and values.get("d"):
        text, end, _ = text.partition(values["d"][:1])
        is_ended = bool(end)
    if text is not None and not {"n", "N"}.isdisjoint(values):
        count = values.get("n", values.get("N", ""))
        text = text.removesuffix("\n")[: int(count)] if count.isdecimal() else None
        is_ended = True
    if not call.certain or text is None or UNKNOWN in text:
        for name in names:
            shell.variables[name] = UNKNOWN
        if array is not None:
            shell.variables[array] = [unknown_word(call.words[0].line)]
        return None
    is_whole = is_ended or (text.endswith("\n") and "d" not in values)
    text = text.removesuffix("\n")

    # 3. Its parts.
    separators = call.settings.get("IFS", shell.expansion.separators)
    blanks = "".join(char for char in separators if char in BLANKS)
    text = text.strip(blanks)
    if array is not None:
        shell.variables[array] = words_from(_items_read(text, separators))
        return is_whole
    parts = [text]
    if len(names) > 1:
        parts = fields_of(text, separators, largest_count=len(names))
    missing = [""] * len(names)
    for name, part in zip(names, [*parts, *missing], strict=False):
        shell.variables[name] = part
    return is_whole


MAX_LINES_READ = 500  # of a text that a loop reads


def _next_text(
    shell: ShellState,
    *,
    reads_all: bool,
) -> str | None:
    """Return the next line of the input, or all of it; None: it is not known."""
    received = shell.received
    if received is None or received.text.count("\n") > MAX_LINES_READ:
        return None
    if reads_all:
        return received.all()
    if UNKNOWN in received.text:
        return None  # it may have more lines
    return received.line()


def _items_read(
    text: str,
    separators: str,
) -> list[str]:
    """Return the items of `read -a`: a separator at the end begins none."""
    items = fields_of(text, separators)
    if items and not items[-1]:
        items.pop()
    return items


def _get_option(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
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


def _leave(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`exit`, `return`, `break` and `continue`."""
    if not call.certain:
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
            raise FunctionEnd(_status_of(call.arguments))
        case name:
            levels = "".join(call.arguments[:1])
            is_number = levels.isascii() and levels.isdigit()
            raise LoopEnd(goes_on=name == "continue", levels=int(levels) if is_number else 1)


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


def _read_lines(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`mapfile -t NAME` and `readarray -d , NAME`."""
    name = call.arguments[-1] if call.arguments else "MAPFILE"
    if not NAME.fullmatch(name):
        return None
    separator = "\n"
    if "-d" in call.arguments[:-1]:
        separator = call.arguments[call.arguments.index("-d") + 1][:1] or "\0"
    text = None if shell.received is None else shell.received.all()
    is_plain = set(call.arguments[:-1]) <= {"-t", "-d", separator}
    if text is None or UNKNOWN in text or not call.certain or not is_plain:
        shell.variables[name] = [unknown_word(call.words[0].line)]
        return None
    parts = re.findall(
        f"[^{re.escape(separator)}]*{re.escape(separator)}|[^{re.escape(separator)}]+", text
    )
    if "-t" in call.arguments:
        parts = [part.removesuffix(separator) for part in parts]
    shell.variables[name] = words_from(parts)
    return True


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
    "shift": _shift,
    "set": _set_arguments,
    "cd": _change_folder,
    "pushd": _change_folder,
    "popd": _return_to_folder,
    "read": _read,
    "getopts": _get_option,
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
    "mapfile": _read_lines,
    "readarray": _read_lines,
    ":": _true,
    "true": _true,
    "false": _false,
}
"""Name -> what bash does; `eval` is the interpreter's."""
