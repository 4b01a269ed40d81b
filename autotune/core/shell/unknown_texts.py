"""Why a text of a shell script is not known: the command or the expansion that it needs.

N=$(nproc)                 # line 1
launch --n $((16 / $N))    # needs N=$(nproc) in line 1
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.core.shell.quotes import NotClosed, bracket_end, quote_end

SHOWN_CHARACTERS = 60

_NAMED = re.compile(r"\$\{?[!#]?(?P<dollar>[A-Za-z_]\w*)|(?<![\w$.])(?P<bare>[A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(|\$\[")
_COMMAND = re.compile(r"\$\((?!\()|`")


@dataclass(frozen=True, kw_only=True)
class UnknownText:
    """Text of a script whose value only a run has, and the assignment in which it stands."""

    text: str
    variable: str = ""
    line: int = 0  # of the assignment; 0: in another file or text
    is_default: bool = False  # True: a variable of the environment is used instead
    is_certain: bool = True  # False: a run may reach the assignment or not

    def __str__(self) -> str:
        shown = " ".join(self.text.split())
        if len(shown) > SHOWN_CHARACTERS:
            shown = f"{shown[:SHOWN_CHARACTERS]}..."
        if self.variable:
            shown = f"{self.variable}={shown}"
        if self.line:
            shown = f"{shown} in line {self.line}"
        return shown

    @property
    def is_output(self) -> bool:
        """Return True for the output of a command."""
        return self.is_certain and _COMMAND.search(self.text) is not None


UnknownTexts = tuple[UnknownText, ...]


def names_in_expansions(raw: str) -> Iterator[str]:
    """Yield the variables that a text names; in arithmetic they need no dollar."""
    is_arithmetic = _ARITHMETIC.search(raw) is not None
    for match in _NAMED.finditer(raw):
        if match["dollar"]:
            yield match["dollar"]
        elif is_arithmetic:
            yield match["bare"]


def expansion_in(raw: str) -> str:
    """Return the first expansion of a text: `$(nproc)` of `--n=$(nproc)`."""
    match = re.search(r"\$|`", raw)
    if match is None:
        return raw
    place = match.start()
    try:
        if match[0] == "`":
            return raw[place : quote_end(raw, "`", place + 1)]
        if raw[place + 1 : place + 2] in ("(", "{"):
            return raw[place : bracket_end(raw, place + 1)]
    except NotClosed:
        pass
    return raw[place:]


def has_own_default(variable: str, raw: str) -> bool:
    """Return True for `N=${N:-$(nproc)}`."""
    return re.match(rf'"?\$\{{{variable}:?[-=]', raw) is not None
