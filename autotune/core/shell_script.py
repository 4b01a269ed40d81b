"""Words of a shell script's commands, expanded as bash does. Nothing is executed.

Variables, arrays, quotes, continuations, here-documents into `read`, `${name:-value}` and its
relatives, whole-number arithmetic, `pwd` and `if` with tests are evaluated. The output of another
command is unknown: a word that contains it holds UNKNOWN. Commands inside loops, functions and
`case`, and under a condition that only a run can decide, are marked `certain=False`.
"""

from __future__ import annotations

import fnmatch
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.shell_words import (
    ASSIGNMENT,
    UNKNOWN,
    VARIABLE_NAME,
    Expansion,
    Token,
    Value,
    Word,
    tokens_of,
    value_text,
)

__all__ = ["UNKNOWN", "SimpleCommand", "Word", "commands_of"]
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
HEADED = {"for", "until", "case", "select", "function"}  # keywords whose own line is no command
_OPENING, _CLOSING = HEADED | {"while"}, {"done", "esac"}
_IGNORED = {"do", "!", "time"}


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """Simple command: its words, and the variables set for it or before it."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    line: int
    end: int  # offset behind its last word
    certain: bool


def commands_of(
    text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[SimpleCommand]:
    """Return the commands that a run of the script would reach, in order."""
    commands: list[SimpleCommand] = []
    shell, blocks = _Shell(arguments, {"PWD": str(Path.cwd()), **(environment or {})}), Blocks()
    joined = ""  # `&&` or `||` before this command
    status: bool | None = True  # of the command before
    for simple, ending in _simple_commands(tokens_of(text)[0]):
        # 1. Keywords open and close blocks.
        tokens = list(simple)
        while tokens and tokens[0].kind == "word" and blocks.keyword(tokens[0].raw, status):
            head, *behind = tokens
            brace = [token for token in behind[-1:] if token.raw == "{"]  # of `function name {`
            tokens = brace if head.raw in HEADED else behind
        # 2. The blocks and `&&`, `||` decide what is reached.
        runs = blocks.reached()
        if joined == "&&" and status is not True:
            runs = status
        if joined == "||" and status is not False:
            runs = None if status is None else False
        joined = ending
        if runs is False or not tokens:
            continue
        # 3. Assignments take effect, words are expanded, tests are evaluated.
        command = shell.command(tokens, runs is True)
        if command is None:
            status = True
            continue
        texts = [word.text for word in command.words]
        outcome = test_outcome(texts)
        status = outcome if outcome is not None or blocks.in_condition else True
        if texts[0] not in ("[", "[[", "test"):
            commands.append(command)
    return commands


class _Shell(Expansion):
    """State of a run: its variables, and those that it exported."""

    def __init__(self, arguments: Sequence[str], variables: dict[str, Value]) -> None:
        super().__init__(arguments, variables)
        self.exported: dict[str, str] = {}

    def command(self, tokens: Sequence[Token], certain: bool) -> SimpleCommand | None:
        """Expand one command; assignments take effect here."""
        assigned: dict[str, str] = {}
        remaining = list(tokens)
        declares = (
            bool(remaining) and remaining[0].kind == "word" and remaining[0].raw in _DECLARING
        )
        exports = declares and remaining[0].raw == "export"
        if declares:
            remaining = [item for item in remaining[1:] if not item.raw.startswith("-")]
        while remaining and (remaining[0].kind == "array" or ASSIGNMENT.match(remaining[0].raw)):
            token = remaining.pop(0)
            name, value = self._assigned(token, certain)
            assigned[name] = value_text(value)
            if (
                not remaining
                or declares
                or any(following.kind == "array" for following in remaining)
            ):
                self.variables[name] = value
                if exports:
                    self.exported[name] = assigned[name]
        if declares or not remaining:
            if not declares and not any(item.kind == "array" for item in tokens):
                self.variables.update(assigned)
            return None
        expanded = tuple(word for token in remaining for word in self.words(token))
        if expanded and expanded[0].text == "read":
            self._read(expanded, remaining, certain)
        if expanded and expanded[0].text == "shift":
            self.arguments = self.arguments[1:]
        if len(expanded) == 2 and expanded[0].text == "cd":
            folder = os.path.join(self.text("PWD"), expanded[1].text)  # noqa: PTH118
            folder = os.path.normpath(folder)
            self.variables["PWD"] = folder if certain and UNKNOWN not in folder else UNKNOWN
        if not expanded:
            return None
        return SimpleCommand(
            words=expanded,
            environment={**self.exported, **assigned},
            line=remaining[0].line,
            end=remaining[-1].end,
            certain=certain,
        )

    def _assigned(self, token: Token, certain: bool) -> tuple[str, Value]:
        match = ASSIGNMENT.match(token.raw)
        assert match is not None
        name, adds = match[1], match[2] == "+="
        value: Value
        if token.kind == "array":
            value = [word for item in token.items for word in self.words(item)]
            if adds:
                before = self.variables.get(name, [])
                if isinstance(before, str):
                    before = [Word(text=before, line=token.line, span=None)]
                value = [*before, *value]
        else:
            value = self.joined(token.raw[match.end() :])
            if adds:
                value = self.text(name) + value
        if certain:
            return name, value
        if isinstance(value, str):
            return name, UNKNOWN
        return name, [Word(text=UNKNOWN, line=token.line, span=None)]

    def _read(self, expanded: Sequence[Word], tokens: Sequence[Token], certain: bool) -> None:
        """`read -r -d '' NAME <<EOF`: the here-document becomes the variable."""
        body = next((token.heredoc for token in tokens if token.heredoc is not None), None)
        name = expanded[-1].text
        if VARIABLE_NAME.fullmatch(name):
            text = UNKNOWN if body is None or not certain else body[0]
            if body is not None and body[1] and certain:
                text = self.joined('"' + text.replace("\\\n", " ").replace('"', '\\"') + '"')
            self.variables[name] = text.strip()


def _simple_commands(tokens: Sequence[Token]) -> Iterator[tuple[list[Token], str]]:
    """Yield the tokens between operators, with the operator that follows."""
    current: list[Token] = []
    for token in tokens:
        if token.kind in ("operator", "newline"):
            if current or token.raw in ("&&", "||"):
                yield current, token.raw
            current = []
        else:
            current.append(token)
    if current:
        yield current, ""


class Blocks:
    """Open `if`, loop, `case` and function blocks around a command. None: known only by
    executing the script.
    """

    def __init__(self) -> None:
        self.in_condition = False
        self._depth = 0  # loops, functions and `case`
        self._heads_function = False  # the next brace opens a function's body
        self._braces: list[bool] = []  # of each open brace: it is a function's
        self._branches: list[bool | None] = []  # of each `if`: its present branch is active
        self._taken: list[bool | None] = []  # of each `if`: an earlier branch was active

    def keyword(self, word: str, status: bool | None) -> bool:
        """Return True for a keyword; `status` is the result of the command before it."""
        branch_taken = self._taken[-1] if self._taken else False
        if word == "if":
            self._branches.append(self._branches[-1] if self._branches else True)
            self._taken.append(False)
            self.in_condition = True
        elif word == "elif":
            self._branches[-1:] = [True]
            self.in_condition = True
        elif word == "then":
            self._branches[-1:] = [_both(_negated(branch_taken), status)]
            self._taken[-1:] = [_negated(_both(_negated(branch_taken), _negated(status)))]
            self.in_condition = False
        elif word == "else":
            self._branches[-1:] = [_negated(branch_taken)]
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


def _both(first: bool | None, second: bool | None) -> bool | None:
    if False in (first, second):
        return False
    return None if None in (first, second) else True


def test_outcome(texts: Sequence[str]) -> bool | None:
    """Return the result of a test; None: known only by executing the script."""
    if texts[0] in ("true", "false"):
        return texts[0] == "true"
    if texts[0] not in ("[", "[[", "test") or any(UNKNOWN in word for word in texts):
        return None
    inner = [word for word in texts[1:] if word not in ("]", "]]")]
    negated = inner[:1] == ["!"]
    result = _tested(inner[negated:])
    return None if result is None else result != negated


def _tested(operands: Sequence[str]) -> bool | None:
    match operands:
        case [] | ["-n"]:
            return False
        case ["-z"]:
            return True
        case [text] | ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case ["-d", name]:
            return Path(name).is_dir()
        case ["-f", name]:
            return Path(name).is_file()
        case ["-e" | "-s", name]:
            return Path(name).exists()
        case [text, "=" | "==", pattern]:
            return fnmatch.fnmatchcase(text, pattern)
        case [text, "!=", pattern]:
            return not fnmatch.fnmatchcase(text, pattern)
        case [first, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as kind, second]:
            compare = getattr(operator, kind[1:])  # the operators have the names of the tests
            try:
                return bool(compare(int(first), int(second)))
            except ValueError:
                return None
    return None
