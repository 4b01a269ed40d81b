"""Words of a shell script's commands, expanded as bash does. Nothing is executed.

Variables, arrays, quotes, continuations, here-documents into `read`, `${name:-value}` and its
relatives, whole-number arithmetic, `pwd` and `if` with tests are evaluated. The output of another command is
unknown: a word that contains it holds UNKNOWN. Commands inside loops, functions and `case`, and
under a condition that only a run can decide, are marked `certain=False`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.shell_script.conditions import HEADED, Blocks, test_outcome
from autotune.core.shell_script.expansion import NAME, UNKNOWN, Expansion, Value, Word
from autotune.core.shell_script.tokens import ASSIGNMENT, Token, simple_commands, tokens_of

__all__ = ["UNKNOWN", "SimpleCommand", "Word", "commands_of"]

_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True, kw_only=True)
class SimpleCommand:
    """Simple command: its words, and the variables set for it or before it."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    line: int
    end: int  # offset behind its last word
    certain: bool


def commands_of(text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> list[SimpleCommand]:
    """Return the commands that a run of the script would reach, in order."""
    return _Run(text, arguments, environment or {}).commands()


class _Run:
    def __init__(self, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.script = script
        self.exported: dict[str, str] = {}
        self.expansion = Expansion(arguments, {"PWD": str(Path.cwd()), **environment})

    def commands(self) -> list[SimpleCommand]:
        found: list[SimpleCommand] = []
        blocks = Blocks()
        joined = ""  # `&&` or `||` before this command
        status: bool | None = True  # of the command before
        for simple, ending in simple_commands(tokens_of(self.script)[0]):
            # 1. Keywords open and close blocks.
            words = list(simple)
            while words and words[0].kind == "word" and blocks.keyword(words[0].raw, status):
                head, *behind = words
                brace = [one for one in behind[-1:] if one.raw == "{"]  # of `function name {`
                words = brace if head.raw in HEADED else behind
            # 2. The blocks and `&&`, `||` decide what is reached.
            runs = blocks.reached()
            if joined == "&&" and status is not True:
                runs = status
            if joined == "||" and status is not False:
                runs = None if status is None else False
            joined = ending
            if runs is False or not words:
                continue
            # 3. Assignments take effect, words are expanded, tests are evaluated.
            made = self._command(words, runs is True)
            if made is None:
                status = True
                continue
            texts = [word.text for word in made.words]
            outcome = test_outcome(texts)
            status = outcome if outcome is not None or blocks.in_condition else True
            if texts[0] not in ("[", "[[", "test"):
                found.append(made)
        return found

    def _command(self, tokens: Sequence[Token], certain: bool) -> SimpleCommand | None:
        """Expand one command; assignments take effect here."""
        own: dict[str, str] = {}
        rest = list(tokens)
        declares = bool(rest) and rest[0].kind == "word" and rest[0].raw in _DECLARING
        exports = declares and rest[0].raw == "export"
        rest = [one for one in rest[1:] if not one.raw.startswith("-")] if declares else rest
        while rest and (rest[0].kind == "array" or ASSIGNMENT.match(rest[0].raw)):
            token = rest.pop(0)
            name, value = self._assigned(token, certain)
            own[name] = value if isinstance(value, str) else " ".join(one.text for one in value)
            if not rest or declares or any(one.kind == "array" for one in rest):
                self.expansion.variables[name] = value
                if exports:
                    self.exported[name] = own[name]
        if declares or not rest:
            self.expansion.variables.update(own if not declares and not any(t.kind == "array" for t in tokens) else {})
            return None
        words = tuple(word for token in rest for word in self.expansion.words(token))
        if words and words[0].text == "read":
            self._read(words, rest, certain)
        if words and words[0].text == "shift":
            self.expansion.arguments = self.expansion.arguments[1:]
        if len(words) == 2 and words[0].text == "cd":
            whole = os.path.normpath(os.path.join(self.expansion.text("PWD"), words[1].text))  # noqa: PTH118
            self.expansion.variables["PWD"] = whole if certain and UNKNOWN not in whole else UNKNOWN
        if not words:
            return None
        return SimpleCommand(
            words=words, environment={**self.exported, **own}, line=rest[0].line, end=rest[-1].end, certain=certain
        )

    def _assigned(self, token: Token, certain: bool) -> tuple[str, Value]:
        match = ASSIGNMENT.match(token.raw)
        assert match is not None
        name, adds = match[1], match[2] == "+="
        value: Value
        if token.kind == "array":
            value = [word for item in token.items for word in self.expansion.words(item)]
            before = self.expansion.variables.get(name, [])
            if adds:
                value = [*(before if isinstance(before, list) else [Word(text=before, line=token.line, span=None)]), *value]
        else:
            value = self.expansion.joined(token.raw[match.end() :])
            if adds:
                value = self.expansion.text(name) + value
        if not certain:
            value = UNKNOWN if isinstance(value, str) else [Word(text=UNKNOWN, line=token.line, span=None)]
        return name, value

    def _read(self, words: Sequence[Word], tokens: Sequence[Token], certain: bool) -> None:
        """`read -r -d '' NAME <<EOF`: the here-document becomes the variable."""
        body = next((token.heredoc for token in tokens if token.heredoc is not None), None)
        name = words[-1].text
        if NAME.fullmatch(name):
            text = UNKNOWN if body is None or not certain else body[0]
            if body is not None and body[1] and certain:
                text = self.expansion.joined('"' + text.replace("\\\n", " ").replace('"', '\\"') + '"')
            self.expansion.variables[name] = text.strip()
