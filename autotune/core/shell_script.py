"""Words of a shell script's commands, expanded as bash does. Nothing is executed.

Variables, arrays, quotes, continuations, here-documents into `read`, `${name:-value}` and its
relatives, whole-number arithmetic, and `if` with tests are evaluated. The output of a command is
unknown: a word that contains it holds UNKNOWN. Commands inside loops, functions and `case`, and
under a condition that only a run can decide, are marked `certain=False`.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.errors import BadInput

UNKNOWN = "\ue000"
"""Character in place of text that only a run of the script can yield."""

MAX_WORDS = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")")
_OPENING, _CLOSING = {"for", "while", "until", "case", "select"}, {"done", "esac"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True, kw_only=True)
class Word:
    """Expanded word and its place in the text; `span` is None for a part of a longer word."""

    text: str
    line: int
    span: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command: its words, and the variables set for it or before it."""

    words: tuple[Word, ...]
    environment: Mapping[str, str]
    line: int
    end: int  # offset behind its last word
    certain: bool


Value = str | list[Word]


def commands_of(text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> list[Command]:
    """Return the commands that a run of the script would reach, in order."""
    return _Run(text, arguments, environment or {}).commands()


@dataclass
class _Token:
    kind: str  # `word`, `operator`, `newline`, `array`
    raw: str
    start: int
    end: int
    line: int
    items: list[_Token] = field(default_factory=list)
    heredoc: tuple[str, bool] | None = None  # text, expanded


class _Run:
    def __init__(self, text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.text = text
        self.variables: dict[str, Value] = {"PWD": str(Path.cwd()), **environment}
        self.exported: dict[str, str] = {}
        self.arguments = list(arguments)

    # 1. Tokens.

    def _tokens(self, start: int = 0, closing: str = "") -> tuple[list[_Token], int]:
        text, at, found = self.text, start, list[_Token]()
        pending: list[tuple[_Token, str, bool, bool]] = []
        while at < len(text):
            char = text[at]
            if len(found) > MAX_WORDS:
                raise BadInput(f"The script has more than {MAX_WORDS:,} words.", way_out="Give a launch script.")
            if char == closing:
                return found, at + 1
            if text.startswith("\\\n", at):
                at += 2
            elif char in " \t\r":
                at += 1
            elif char == "#":
                at = _end_of_line(text, at)
            elif char == "\n":
                found.append(_Token("newline", "\n", at, at + 1, self._line(at)))
                at += 1
                for token, word, quoted, tabs in pending:
                    body, at = _heredoc(text, at, word, tabs)
                    token.heredoc = (body, not quoted)
                pending = []
            elif match := re.compile(r"(\d*)(<<<|<<-?|>>|>&|<&|&>>?|>\||>|<)").match(text, at):
                at = match.end()
                while at < len(text) and text[at] in " \t":
                    at += 1
                end = self._word_end(at)
                if match[2] in ("<<", "<<-") and found:
                    raw = text[at:end]
                    word = re.sub(r"['\"\\]", "", raw)
                    pending.append((found[-1], word, raw != word, match[2] == "<<-"))
                at = end
            elif operator_ := next((one for one in _OPERATORS if text.startswith(one, at)), None):
                found.append(_Token("operator", operator_, at, at + len(operator_), self._line(at)))
                at += len(operator_)
            else:
                end = self._word_end(at)
                raw = text[at:end]
                if _ASSIGNMENT.fullmatch(raw) and end < len(text) and text[end] == "(":
                    items, end = self._tokens(end + 1, ")")
                    kept = [one for one in items if one.kind == "word"]
                    found.append(_Token("array", raw, at, end, self._line(at), kept))
                else:
                    found.append(_Token("word", raw, at, end, self._line(at)))
                at = max(end, at + 1)
        return found, at

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def _word_end(self, at: int) -> int:
        text = self.text
        while at < len(text):
            char = text[at]
            if char == "\\":
                at += 2
            elif char == "'":
                at = _find(text, "'", at + 1, self._line(at))
            elif char == '"':
                at = _double_end(text, at + 1, self._line(at))
            elif text.startswith("$'", at):
                at = _find(text, "'", at + 2, self._line(at))
            elif char == "$" and at + 1 < len(text) and text[at + 1] in "({":
                at = _balanced(text, at + 1, self._line(at))
            elif char == "`":
                at = _find(text, "`", at + 1, self._line(at))
            elif char in " \t\r\n;|&()<>":
                return at
            else:
                at += 1
        return min(at, len(text))

    # 2. Commands.

    def commands(self) -> list[Command]:
        tokens, _ = self._tokens()
        found: list[Command] = []
        branches: list[bool | None] = []  # active, not active, or unknown
        taken: list[bool | None] = []  # of each `if`: a branch before was active
        depth, joined, test = 0, "", False
        status: bool | None = True
        for simple, ending in _simple_commands(tokens):
            simple = list(simple)
            while simple and simple[0].kind == "word":
                first = simple[0].raw
                if first == "if":
                    branches.append(True if all(one for one in branches) else branches[-1] if branches else True)
                    taken.append(False)
                    test = True
                elif first == "elif":
                    branches[-1:], test = [True], True
                elif first == "then":
                    branches[-1:] = [_branch(taken[-1] if taken else False, status)]
                    taken[-1:] = [_any(taken[-1] if taken else False, status)]
                    test = False
                elif first == "else":
                    before = taken[-1] if taken else False
                    branches[-1:] = [None if before is None else not before]
                elif first == "fi":
                    branches, taken = branches[:-1], taken[:-1]
                elif first in _OPENING or first == "function":
                    depth += 1
                    simple = [] if first != "while" else simple
                elif first in _CLOSING:
                    depth = max(0, depth - 1)
                elif first in ("{", "}", "do", "!", "time"):
                    pass
                else:
                    break
                simple = simple[1:]
            runs: bool | None = True
            outer = branches[:-1] if test else branches
            if any(one is False for one in outer):
                runs = False
            elif depth or any(one is None for one in outer):
                runs = None
            if joined == "&&" and status is not True:
                runs = False if status is False else None
            if joined == "||" and status is not False:
                runs = False if status is True else None
            joined = ending
            if runs is False or not simple:
                continue
            made = self._command(simple, runs is True)
            if made is None:
                status = True
                continue
            outcome = _outcome(made)
            status = outcome if outcome is not None or test else True
            if test and outcome is None and made.words and made.words[0].text not in ("[", "[[", "test"):
                status = None
            if made.words and made.words[0].text not in ("[", "[[", "test"):
                found.append(made)
        return found

    def _command(self, tokens: Sequence[_Token], certain: bool) -> Command | None:
        """Expand one command; assignments take effect here."""
        own: dict[str, str] = {}
        rest = list(tokens)
        declares = bool(rest) and rest[0].kind == "word" and rest[0].raw in _DECLARING
        exports = declares and rest[0].raw == "export"
        rest = [one for one in rest[1:] if not one.raw.startswith("-")] if declares else rest
        while rest and (rest[0].kind == "array" or _ASSIGNMENT.match(rest[0].raw)):
            token = rest.pop(0)
            name, value = self._assigned(token, certain)
            own[name] = value if isinstance(value, str) else " ".join(one.text for one in value)
            if not rest or declares or any(one.kind == "array" for one in rest):
                self.variables[name] = value
                if exports:
                    self.exported[name] = own[name]
        if declares or not rest:
            self.variables.update(own if not declares and not any(t.kind == "array" for t in tokens) else {})
            return None
        words = tuple(word for token in rest for word in self._expanded(token))
        if words and words[0].text == "read":
            self._read(words, rest, certain)
        if words and words[0].text == "shift":
            self.arguments = self.arguments[1:]
        if not words:
            return None
        return Command(words=words, environment={**self.exported, **own}, line=rest[0].line, end=rest[-1].end, certain=certain)

    def _assigned(self, token: _Token, certain: bool) -> tuple[str, Value]:
        match = _ASSIGNMENT.match(token.raw)
        assert match is not None
        name, adds = match[1], match[2] == "+="
        value: Value
        if token.kind == "array":
            value = [word for item in token.items for word in self._expanded(item)]
            before = self.variables.get(name, [])
            if adds:
                value = [*(before if isinstance(before, list) else [Word(text=before, line=token.line, span=None)]), *value]
        else:
            value = self._joined(token.raw[match.end() :])
            if adds:
                value = self._text(name) + value
        if not certain:
            value = UNKNOWN if isinstance(value, str) else [Word(text=UNKNOWN, line=token.line, span=None)]
        return name, value

    def _read(self, words: Sequence[Word], tokens: Sequence[_Token], certain: bool) -> None:
        """`read -r -d '' NAME <<EOF`: the here-document becomes the variable."""
        body = next((token.heredoc for token in tokens if token.heredoc is not None), None)
        name = words[-1].text
        if _NAME.fullmatch(name):
            text = UNKNOWN if body is None or not certain else body[0]
            if body is not None and body[1] and certain:
                text = self._joined('"' + text.replace("\\\n", " ").replace('"', '\\"') + '"')
            self.variables[name] = text.strip()

    # 3. Expansion.

    def _expanded(self, token: _Token) -> list[Word]:
        """Return the words of a token: unquoted variables are split, arrays yield one word each."""
        pieces = list(self._pieces(token.raw))
        words: list[list[tuple[str, Word | None]]] = [[]]
        started = False
        for value, quoted in pieces:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if index:
                        words.append([])
                    words[-1].append((item.text, item))
                started = started or bool(value)
            elif quoted:
                words[-1].append((value, None))
                started = True
            else:
                for index, part in enumerate(re.split(r"\s+", value)):
                    if index:
                        words.append([])
                    if part:
                        words[-1].append((part, None))
                        started = True
        found = []
        for parts in words:
            if not parts:
                continue
            alone = parts[0][1] if len(parts) == 1 else None
            if alone is not None and alone.span is not None:
                found.append(alone)
            else:
                whole = len([one for one in words if one]) == 1
                text = "".join(part for part, _ in parts)
                found.append(Word(text=text, line=token.line, span=(token.start, token.end) if whole else None))
        return found if started else []

    def _joined(self, raw: str) -> str:
        return "".join(value if isinstance(value, str) else " ".join(one.text for one in value) for value, _ in self._pieces(raw))

    def _pieces(self, raw: str) -> Iterator[tuple[Value, bool]]:
        """Yield (value, quoted) for each part of a word."""
        at = 0
        plain = ""
        while at < len(raw):
            char = raw[at]
            if char == "\\" and at + 1 < len(raw):
                if plain:
                    yield plain, False
                    plain = ""
                if raw[at + 1] != "\n":
                    yield raw[at + 1], True
                at += 2
                continue
            if char not in "'\"$`":
                if char == "~" and at == 0 and not plain and (len(raw) == 1 or raw[1] == "/"):
                    yield self._text("HOME"), True
                else:
                    plain += char
                at += 1
                continue
            if plain:
                yield plain, False
                plain = ""
            if char == "'":
                end = _find(raw, "'", at + 1, 1)
                yield raw[at + 1 : end - 1], True
            elif char == '"':
                end = _double_end(raw, at + 1, 1)
                inner = list(self._in_double(raw[at + 1 : end - 1]))
                yield from inner or [("", True)]
            elif raw.startswith("$'", at):
                end = _find(raw, "'", at + 2, 1)
                yield raw[at + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t"), True
            else:
                value, end = self._dollar(raw, at)
                yield value, False
            at = end
        if plain:
            yield plain, False

    def _in_double(self, raw: str) -> Iterator[tuple[Value, bool]]:
        at, plain = 0, ""
        while at < len(raw):
            if raw[at] == "\\" and at + 1 < len(raw) and raw[at + 1] in '"\\$`\n':
                plain += "" if raw[at + 1] == "\n" else raw[at + 1]
                at += 2
            elif raw[at] in "$`":
                if plain:
                    yield plain, True
                    plain = ""
                value, at = self._dollar(raw, at)
                yield (value if isinstance(value, str) else list(value)), True
            else:
                plain += raw[at]
                at += 1
        if plain:
            yield plain, True

    def _dollar(self, raw: str, at: int) -> tuple[Value, int]:
        """Return the value of `$...` at this offset, and the offset behind it."""
        if raw[at] == "`":
            return UNKNOWN, _find(raw, "`", at + 1, 1)
        following = raw[at + 1 : at + 2]
        if raw.startswith("$((", at):
            end = _balanced(raw, at + 1, 1)
            return self._arithmetic(raw[at + 3 : end - 2]), end
        if following == "(":
            return UNKNOWN, _balanced(raw, at + 1, 1)
        if following == "{":
            end = _balanced(raw, at + 1, 1)
            return self._braces(raw[at + 2 : end - 1]), end
        if following in ("@", "*"):
            return [Word(text=one, line=1, span=None) for one in self.arguments], at + 2
        if following.isdigit():
            index = int(following)
            return (self.arguments[index - 1] if 0 < index <= len(self.arguments) else ""), at + 2
        if following in ("#", "?", "$", "!", "-"):
            return (str(len(self.arguments)) if following == "#" else UNKNOWN), at + 2
        match = _NAME.match(raw, at + 1)
        if match is None:
            return "$", at + 1
        return self._text(match[0]), match.end()

    def _braces(self, inner: str) -> Value:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return str(len(self._text(inner[1:])))
        match = re.match(r"([A-Za-z_][A-Za-z0-9_]*|\d+|[@*])(\[(.*?)\])?", inner)
        if match is None:
            return UNKNOWN
        name, index, rest = match[1], match[3], inner[match.end() :]
        value: Value
        if name in "@*":
            value = [Word(text=one, line=1, span=None) for one in self.arguments]
        elif name.isdigit():
            value = self.arguments[int(name) - 1] if 0 < int(name) <= len(self.arguments) else ""
        elif index in ("@", "*"):
            held = self.variables.get(name, [])
            value = held if isinstance(held, list) else [Word(text=held, line=1, span=None)]
        elif index is not None:
            held, place = self.variables.get(name, []), self._arithmetic(index)
            known = isinstance(held, list) and place.isdigit() and int(place) < len(held)
            value = held[int(place)].text if known and isinstance(held, list) else ""
        else:
            value = self._text(name)
        return self._modified(name, value, rest) if rest else value

    def _modified(self, name: str, value: Value, rest: str) -> Value:
        sliced = re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest)
        if sliced and isinstance(value, list):
            first = int(sliced[1]) - (1 if name in "@*" and int(sliced[1]) else 0)
            return value[first:][: int(sliced[2]) if sliced[2] else None]
        text = value if isinstance(value, str) else " ".join(one.text for one in value)
        is_set = name in self.variables or (name.isdigit() and int(name) <= len(self.arguments)) or bool(text)
        for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?"):
            if rest.startswith(sign):
                other = rest[len(sign) :]
                given = bool(text) if sign.startswith(":") else is_set
                if sign.endswith("+"):
                    return self._joined(other) if given else ""
                if given:
                    return value
                result = self._joined(other)
                if sign.endswith("="):
                    self.variables[name] = result
                return UNKNOWN if sign.endswith("?") else result
        for sign, kind in (("##", "longest"), ("#", "shortest"), ("%%", "longest"), ("%", "shortest")):
            if rest.startswith(sign):
                return _stripped(text, self._joined(rest[len(sign) :]), sign[0] == "#", kind == "longest")
        if rest.startswith("/"):
            whole = rest.startswith("//")
            old, _, new = rest[2 if whole else 1 :].partition("/")
            return text.replace(self._joined(old), self._joined(new), -1 if whole else 1)
        if rest in (",,", "^^"):
            return text.lower() if rest == ",," else text.upper()
        match = re.fullmatch(r":(\d+)(?::(\d+))?", rest)
        if match:
            return text[int(match[1]) :][: int(match[2]) if match[2] else None]
        return UNKNOWN

    def _text(self, name: str) -> str:
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else value[0].text if value else ""

    def _arithmetic(self, raw: str) -> str:
        names = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", raw)
        names = re.sub(r"\$(\d)", lambda one: (self.arguments + [""] * 9)[int(one[1]) - 1] or "0", names)
        known = _NAME.sub(lambda one: self._text(one[0]) or "0", names)
        try:
            return str(_whole_number(ast.parse(known.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            return UNKNOWN


_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _whole_number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result: int = _ARITHMETIC[type(node.op)](_whole_number(node.left), _whole_number(node.right))
        if abs(result) < 2**63:
            return result
    raise ValueError("no whole-number arithmetic")


def _simple_commands(tokens: Sequence[_Token]) -> Iterator[tuple[list[_Token], str]]:
    """Yield the tokens between operators, with the operator that follows."""
    current: list[_Token] = []
    for token in tokens:
        if token.kind in ("operator", "newline"):
            if current or token.raw in ("&&", "||"):
                yield current, token.raw
            current = []
        else:
            current.append(token)
    if current:
        yield current, ""


def _outcome(command: Command) -> bool | None:
    """Return the result of a test; None: only a run can tell."""
    words = [word.text for word in command.words]
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


def _branch(before: bool | None, status: bool | None) -> bool | None:
    if before is True:
        return False
    return status if before is False else (False if status is False else None)


def _any(before: bool | None, status: bool | None) -> bool | None:
    return True if True in (before, status) else None if None in (before, status) else False


def _stripped(text: str, pattern: str, front: bool, longest: bool) -> str:
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        part = text[:length] if front else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[length:] if front else text[: len(text) - length]
    return text


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _find(text: str, mark: str, at: int, line: int) -> int:
    """Return the offset behind the closing mark."""
    while True:
        end = text.find(mark, at)
        if end < 0:
            raise BadInput(f"line {line}: the quote {mark} is not closed.", way_out="Close it.")
        if mark == "'" or text[end - 1] != "\\":
            return end + 1
        at = end + 1


def _double_end(text: str, at: int, line: int) -> int:
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at + 1
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _balanced(text, at + 1, line)
        else:
            at += 1
    raise BadInput(f'line {line}: the quote " is not closed.', way_out="Close it.")


def _balanced(text: str, at: int, line: int) -> int:
    """Return the offset behind the bracket that closes the one at `at`."""
    opening = text[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opening == "(":
            at = _find(text, "'", at + 1, line) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise BadInput(f"line {line}: {opening} is not closed.", way_out=f"Close it with {closing}.")


def _heredoc(text: str, at: int, word: str, tabs: bool) -> tuple[str, int]:
    body: list[str] = []
    while at < len(text):
        end = _end_of_line(text, at)
        line = text[at:end]
        at = end + 1
        if (line.lstrip("\t") if tabs else line) == word:
            break
        body.append(line.lstrip("\t") if tabs else line)
    return "\n".join(body), at
