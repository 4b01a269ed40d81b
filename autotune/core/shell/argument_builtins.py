"""What bash does with a script's arguments and options: `shift`, `set` and `getopts`."""

from __future__ import annotations

from autotune.core.shell.builtin_call import BuiltInCall
from autotune.core.shell.state import ShellState, Truth
from autotune.core.shell.variable_values import UNKNOWN


def shift(
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


def set_arguments(
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


def get_option(
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
