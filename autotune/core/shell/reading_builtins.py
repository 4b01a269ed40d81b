"""What bash's `read` and `mapfile` take from their input."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autotune.core.shell.builtin_call import BuiltInCall
from autotune.core.shell.state import ShellState, Truth, unknown_word
from autotune.core.shell.variable_values import BLANKS, NAME, UNKNOWN, fields_of, words_from

_READ_VALUES = "adinNptu"  # options of `read` that have a value
_READ_LINES_VALUES = "cCdnOsu"  # those of `mapfile`
MAX_LINES_READ = 500  # of a text that a loop reads


def read(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`read -r -d '' NAME <<EOF`, `read A B <<< TEXT` and `IFS=, read -ra LIST <<< TEXT`."""
    # 1. Options and names.
    values, names = _options_of(call.arguments, with_value=_READ_VALUES)
    array = values.get("a")

    # 2. The text, of which one line is read unless `-d` says otherwise.
    text = None
    if "u" not in values:
        text = _next_text(shell, reads_all="d" in values)
    is_ended = False
    if text is not None and values.get("d"):
        text, end, _ = text.partition(values["d"][:1])
        is_ended = bool(end)
    if text is not None and not {"n", "N"}.isdisjoint(values):
        count = values.get("n", values.get("N", ""))
        text = text.removesuffix("\n")[: int(count)] if count.isdecimal() else None
        is_ended = True
    is_array = array is not None
    if text is not None and "r" not in values:
        text = _without_backslashes(text, is_split=is_array or len(names) > 1)
    if not names and not is_array:
        names = ["REPLY"]
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
    if names != ["REPLY"]:
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


def _without_backslashes(
    text: str,
    *,
    is_split: bool,
) -> str | None:
    """Return the text as `read` without `-r` has it; None: a backslash may keep a blank."""
    text = text.replace("\\\n", "")
    if re.search(r"\\[\s\\]", text) or (is_split and "\\" in text):
        return None
    return text.replace("\\", "")


def _options_of(
    arguments: Sequence[str],
    with_value: str,
) -> tuple[Mapping[str, str], list[str]]:
    """Return the options by their letters, and the words behind them. `-ra LIST` are two options,
    and `-d,` has its value in the same word.
    """
    values: dict[str, str] = {}
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-") and len(remaining[0]) > 1:
        letters = remaining.pop(0)[1:]
        for place, letter in enumerate(letters):
            values[letter] = ""
            if letter in with_value:
                values[letter] = letters[place + 1 :]
                if not values[letter] and remaining:
                    values[letter] = remaining.pop(0)
                break
    return values, remaining


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


def read_lines(
    shell: ShellState,
    call: BuiltInCall,
) -> Truth:
    """`mapfile -t NAME` and `readarray -d , NAME`."""
    # 1. Options and the name.
    values, names = _options_of(call.arguments, with_value=_READ_LINES_VALUES)
    name = ["MAPFILE", *names][-1]
    if not NAME.fullmatch(name):
        return None

    # 2. The text, and its parts.
    separator = values.get("d", "\n")[:1] or "\0"
    text = None if shell.received is None else shell.received.all()
    first = values.get("s", "0")
    count = values.get("n", "0")
    is_plain = values.keys() <= {"t", "d", "n", "s"} and (first + count).isdecimal()
    if text is None or UNKNOWN in text or not call.certain or not is_plain:
        shell.variables[name] = [unknown_word(call.words[0].line)]
        return None
    parts = re.findall(
        f"[^{re.escape(separator)}]*{re.escape(separator)}|[^{re.escape(separator)}]+", text
    )
    parts = parts[int(first) :]
    if int(count):
        parts = parts[: int(count)]
    if "t" in values:
        parts = [part.removesuffix(separator) for part in parts]
    shell.variables[name] = words_from(parts)
    return True
