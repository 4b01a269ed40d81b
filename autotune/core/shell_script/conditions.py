"""Control flow of a shell script: results of `[ ... ]`, and the blocks around a command."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Sequence
from pathlib import Path

from autotune.core.shell_script.expansion import UNKNOWN

HEADED = {"for", "until", "case", "select", "function"}  # keywords whose own line is no command

_OPENING, _CLOSING = HEADED | {"while"}, {"done", "esac"}
_IGNORED = {"do", "!", "time"}


class Blocks:
    """Open `if`, loop, `case` and function blocks around a command. None: known only by executing the script."""

    def __init__(self) -> None:
        self.in_condition = False
        self._depth = 0  # loops, functions and `case`
        self._heads_function = False  # the next brace opens a function's body
        self._braces: list[bool] = []  # of each open brace: it is a function's
        self._branches: list[bool | None] = []  # of each `if`: its present branch is active
        self._taken: list[bool | None] = []  # of each `if`: an earlier branch was active

    def keyword(self, word: str, status: bool | None) -> bool:
        """Return True for a keyword; `status` is the result of the command before it."""
        taken = self._taken[-1] if self._taken else False
        if word == "if":
            self._branches.append(self._branches[-1] if self._branches else True)
            self._taken.append(False)
            self.in_condition = True
        elif word == "elif":
            self._branches[-1:] = [True]
            self.in_condition = True
        elif word == "then":
            self._branches[-1:] = [_both(_negated(taken), status)]
            self._taken[-1:] = [_negated(_both(_negated(taken), _negated(status)))]
            self.in_condition = False
        elif word == "else":
            self._branches[-1:] = [_negated(taken)]
        elif word == "fi":
            self._branches, self._taken = self._branches[:-1], self._taken[:-1]
        elif word == "{":
            self._braces.append(self._heads_function)
            self._heads_function = False
        elif word == "}":
            self._depth -= bool(self._braces and self._braces.pop())
        elif word in _OPENING:
            self._depth += 1
            self._heads_function = word == "function"
        elif word in _CLOSING:
            self._depth = max(0, self._depth - 1)
        else:
            return word in _IGNORED
        return True

    def reached(self) -> bool | None:
        """Return True if a command here runs."""
        outer = self._branches[:-1] if self.in_condition else self._branches
        if False in outer:
            return False
        return None if self._depth or None in outer else True


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def test_outcome(texts: Sequence[str]) -> bool | None:
    """Return the result of a test; None: known only by executing the script."""
    words = list(texts)
    if words[0] == "true" or words[0] == "false":
        return words[0] == "true"
    if words[0] not in ("[", "[[", "test") or any(UNKNOWN in word for word in words):
        return None
    inner = [word for word in words[1:] if word not in ("]", "]]")]
    negated = inner[:1] == ["!"]
    inner = inner[1:] if negated else inner
    result = _tested(inner)
    return None if result is None else result != negated


def _tested(words: Sequence[str]) -> bool | None:
    match words:
        case [] | ["-n"]:
            return False
        case ["-z"]:
            return True
        case [one]:
            return bool(one)
        case ["-z", one]:
            return not one
        case ["-n", one]:
            return bool(one)
        case ["-f" | "-d" | "-e" | "-s" as kind, one]:
            path = Path(one)
            return path.is_dir() if kind == "-d" else path.is_file() if kind == "-f" else path.exists()
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as kind, right]:
            try:
                compare = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le}
                return bool({**compare, "-gt": operator.gt, "-ge": operator.ge}[kind](int(left), int(right)))
            except ValueError:
                return None
    return None
