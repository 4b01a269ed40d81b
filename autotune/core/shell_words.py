"""Words of a shell script, expanded as bash does: quotes, variables, arrays, arithmetic.

A word's text comes from the syntax tree (`shell_script`); what its quotes and dollars mean is
computed here. Nothing is executed: text that only a run can yield is one character, UNKNOWN. A
variable that is not set is empty, as in bash, and the word names it.

Expansion has a budget: a script of few lines can double a variable until no memory is left.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autotune.core.errors import BadInput

UNKNOWN = "\ue000"  # character in place of text that only a run of the script can yield
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAX_TEXT = 2**20  # characters of all expanded text
MAX_EXPANDED_WORDS = 100_000
MAX_COMMANDS = 100_000  # commands and iterations
MAX_NESTING = 50  # calls of functions, and substitutions inside others


@dataclass(frozen=True, kw_only=True)
class Word:
    """Expanded word and its place in the text; `span` is None for a part of a longer word."""

    text: str
    line: int
    span: tuple[int, int] | None
    unset: tuple[str, ...] = ()  # variables without a value, empty in the text
    missing: tuple[str, ...] = ()  # those that would have been the words behind it


Value: TypeAlias = str | list[Word] | dict[str, str]


@dataclass
class Budget:
    """What the reading of a script may cost, whatever the script says."""

    text: int = MAX_TEXT
    words: int = MAX_EXPANDED_WORDS
    steps: int = MAX_COMMANDS
    nesting: int = MAX_NESTING

    def spend(
        self,
        *,
        text: int = 0,
        words: int = 0,
        steps: int = 0,
    ) -> None:
        self.text -= text
        self.words -= words
        self.steps -= steps
        if min(self.text, self.words, self.steps) < 0:
            raise BadInput(
                f"The script expands to more than {MAX_TEXT // 2**20} MiB of text, or to more than"
                f" {MAX_EXPANDED_WORDS:,} words or steps.",
                way_out="Give a launch script: the one training command, with its variables set.",
            )


@dataclass
class _Piece:
    """Part of a word: its value, and whether quotes keep its blanks."""

    value: str | list[Word]
    quoted: bool


@dataclass
class Expansion:
    """Variables and arguments of a run, and the words that they yield."""

    arguments: list[str]
    variables: dict[str, Value]
    script: str = UNKNOWN  # path of the script, `$0`
    budget: Budget = field(default_factory=Budget)
    output_of: Callable[[str], str] = lambda command: UNKNOWN
    """Return what a command in `$(...)` prints."""

    _unset: list[str] = field(
        default_factory=list
    )  # variables without a value, since the last word
    _emptied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Variable that is empty -> variables without a value that made it so."""

    # Words.

    @property
    def unset(self) -> tuple[str, ...]:
        """Variables without a value in the last word or assigned value."""
        return tuple(dict.fromkeys(self._unset))

    def assigned(self, name: str, raw: str) -> str:
        """Return the text that an assignment gives a variable."""
        self._unset.clear()
        text = self.joined(raw)
        self._emptied.pop(name, None)
        if not text and self._unset:
            self._emptied[name] = self.unset
        return text

    def words(
        self,
        raw: str,
        line: int,
        span: tuple[int, int] | None,
    ) -> list[Word]:
        """Return the words of one word of the script: unquoted variables are split at blanks, and
        an array yields a word for each of its items.
        """
        self._unset.clear()
        expanded: list[Word] = []
        for text in brace_expanded(raw):
            expanded += self._split(list(self._pieces(text)), line, span)
        self.budget.spend(words=len(expanded), text=sum(len(word.text) for word in expanded))
        return expanded

    def joined(self, raw: str) -> str:
        """Return the text of an assigned value, or of any other place where nothing is split."""
        parts: list[str] = []
        for piece in self._pieces(raw):
            text = piece.value if isinstance(piece.value, str) else _joined(piece.value)
            self.budget.spend(text=len(text))
            parts.append(text)
        return "".join(parts)

    def text(self, name: str) -> str:
        """Return a variable as one text; that of an array is its first item."""
        if name not in self.variables:
            self._unset.append(name)
            return ""
        value = self.variables[name]
        if not value:
            self._unset += self._emptied.get(name, ())
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return value.get("0", "")
        return value[0].text if value else ""

    def _split(
        self,
        pieces: Sequence[_Piece],
        line: int,
        span: tuple[int, int] | None,
    ) -> list[Word]:
        # 1. Fields, each a list of parts: blanks of unquoted text and items of arrays end one.
        fields: list[list[str]] = [[]]
        items: list[list[Word]] = [[]]  # whole items of arrays in each field
        for piece in pieces:
            if isinstance(piece.value, list):
                parts = [item.text for item in piece.value]
            elif piece.quoted:
                parts = [piece.value]
            else:
                parts = re.split(r"\s+", piece.value)
            for index, part in enumerate(parts):
                if index:
                    fields.append([])
                    items.append([])
                if part or piece.quoted or isinstance(piece.value, list):
                    fields[-1].append(part)
                    if isinstance(piece.value, list):
                        items[-1].append(piece.value[index])

        # 2. Words. A whole item of an array keeps the place where it is written.
        filled = [index for index, parts in enumerate(fields) if parts]
        unset = self.unset
        expanded = []
        for index in filled:
            is_item = len(fields[index]) == 1 and len(items[index]) == 1
            if is_item and items[index][0].span is not None:
                expanded.append(items[index][0])
                continue
            own_span = span if len(filled) == 1 else None
            text = "".join(fields[index])
            expanded.append(
                Word(
                    text=text,
                    line=line,
                    span=own_span,
                    unset=unset,
                )
            )
        return expanded

    # Quotes.

    def _pieces(self, raw: str, *, in_quotes: bool = False) -> Iterator[_Piece]:
        """Yield the parts of a word, or of the text between two double quotes."""
        place = 0
        literal = ""
        while place < len(raw):
            end, pieces = self._special(raw, place, in_quotes)
            if pieces is None:
                literal += raw[place]
                place += 1
                continue
            if literal:
                yield _Piece(literal, in_quotes)
                literal = ""
            yield from pieces
            place = end
        if literal:
            yield _Piece(literal, in_quotes)

    def _special(
        self,
        raw: str,
        place: int,
        in_quotes: bool,
    ) -> tuple[int, list[_Piece] | None]:
        """Return the end and the value of a quote or an expansion here; None for a plain
        character.
        """
        char = raw[place]
        following = raw[place + 1 : place + 2]
        if char == "\\" and following and (not in_quotes or following in '"\\$`\n'):
            return place + 2, [] if following == "\n" else [_Piece(following, True)]
        if char in "$`" and not (char + following == "$'" and not in_quotes):
            value, end = self._dollar(raw, place)
            return end, [_Piece(value, in_quotes)]
        if in_quotes:
            return place, None
        if char == "'":
            end = quote_end(raw, "'", place + 1)
            return end, [_Piece(raw[place + 1 : end - 1], True)]
        if char == '"':
            end = double_quote_end(raw, place + 1)
            inner = list(self._pieces(raw[place + 1 : end - 1], in_quotes=True))
            return end, inner or [_Piece("", True)]
        if char + following == "$'":
            end = quote_end(raw, "'", place + 2)
            text = raw[place + 2 : end - 1].replace("\\n", "\n").replace("\\t", "\t")
            return end, [_Piece(text, True)]
        if char == "~" and place == 0 and following in ("", "/"):
            return 1, [_Piece(self.text("HOME"), True)]
        return place, None

    # Dollars.

    def _dollar(self, raw: str, place: int) -> tuple[str | list[Word], int]:
        """Return the value of `$...` or of backquotes here, and its end."""
        if raw[place] == "`":
            end = quote_end(raw, "`", place + 1)
            return self._output(raw[place + 1 : end - 1]), end
        following = raw[place + 1 : place + 2]
        if following in ("(", "{"):
            end = bracket_end(raw, place + 1)
            if raw.startswith("$((", place):
                return self.arithmetic(raw[place + 3 : end - 2]), end
            inner = raw[place + 2 : end - 1]
            return (self._output(inner) if following == "(" else self._braces(inner)), end
        if following in ("@", "*") or _is_digit(following):
            return self._argument(following), place + 2
        if following == "#":
            return str(len(self.arguments)), place + 2
        if following in ("?", "$", "!", "-"):
            return UNKNOWN, place + 2
        match = NAME.match(raw, place + 1)
        if match is None:
            return "$", place + 1
        return self.text(match[0]), match.end()

    def _output(self, command: str) -> str:
        if self.budget.nesting <= 0:
            return UNKNOWN
        self.budget.nesting -= 1
        try:
            return self.output_of(command)
        finally:
            self.budget.nesting += 1

    def _argument(self, name: str) -> str | list[Word]:
        """Return `$@`, or one argument by its number."""
        if name in ("@", "*"):
            return [
                Word(
                    text=argument,
                    line=1,
                    span=None,
                )
                for argument in self.arguments
            ]
        number = int(name)
        if number == 0:
            return self.script
        if number <= len(self.arguments):
            return self.arguments[number - 1]
        self._unset.append(name)
        return ""

    def _braces(self, inner: str) -> str | list[Word]:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return self._length(inner[1:])
        match = _PARAMETER.match(inner)
        if match is None:
            return UNKNOWN
        name = match["name"]
        index = match["index"]
        operation = inner[match.end() :]
        noted = len(self._unset)
        value = self._parameter(name, index)
        if not operation:
            return value
        # Operators such as `:-` say what an unset variable means.
        del self._unset[noted:]
        return self._modified(name, value, operation)

    def _parameter(self, name: str, index: str | None) -> str | list[Word]:
        if name in ("@", "*") or name.isdigit():
            return self._argument(name)
        if index is None:
            return self.script if name == "BASH_SOURCE" else self.text(name)
        if name == "BASH_SOURCE":
            return self.script
        value = self.variables.get(name, [])
        if index in ("@", "*"):
            return _items(value)
        if isinstance(value, dict):
            return value.get(self.joined(index), "")
        number = self.arithmetic(index)
        items = _items(value)
        if _is_number(number) and int(number) < len(items):
            return items[int(number)].text
        return ""

    def _length(self, name: str) -> str:
        match = _PARAMETER.fullmatch(name)
        if match is not None and match["index"] in ("@", "*"):
            return str(len(_items(self.variables.get(match["name"], []))))
        return str(len(self.text(name)))

    def _modified(
        self,
        name: str,
        value: str | list[Word],
        operation: str,
    ) -> str | list[Word]:
        """Return the value after an operator of `${name...}`."""
        slice_ = _SLICE.fullmatch(operation)
        if slice_ is not None:
            return self._sliced(name, value, slice_["start"], slice_["length"])
        text = value if isinstance(value, str) else _joined(value)
        for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?"):
            if operation.startswith(sign):
                return self._defaulted(name, value, sign, operation[len(sign) :])
        for sign in ("##", "#", "%%", "%"):
            if operation.startswith(sign):
                pattern = self.joined(operation[len(sign) :])
                return _stripped(text, pattern, at_front=sign[0] == "#", longest=len(sign) == 2)
        if operation.startswith("/"):
            everywhere = operation.startswith("//")
            old, _, new = operation[2 if everywhere else 1 :].partition("/")
            replaced = text.replace(self.joined(old), self.joined(new), -1 if everywhere else 1)
            self.budget.spend(text=len(replaced))
            return replaced
        cases = {",,": text.lower, "^^": text.upper}
        return cases[operation]() if operation in cases else UNKNOWN

    def _sliced(
        self,
        name: str,
        value: str | list[Word],
        start_text: str,
        length_text: str | None,
    ) -> str | list[Word]:
        start = int(start_text)
        if isinstance(value, list) and name in ("@", "*"):
            start = max(0, start - 1)  # the arguments are counted from 1
        end = None if length_text is None else start + int(length_text)
        return value[start:end]

    def _defaulted(
        self,
        name: str,
        value: str | list[Word],
        sign: str,
        alternative: str,
    ) -> str | list[Word]:
        """Return the value, or the alternative: `:` also replaces an empty value."""
        has_text = bool(value)
        is_set = name in self.variables or has_text
        if name.isdigit():
            is_set = int(name) <= len(self.arguments)
        is_present = has_text if sign.startswith(":") else is_set
        if sign.endswith("+"):
            return self.joined(alternative) if is_present else ""
        if is_present:
            return value
        if sign.endswith("?"):
            return UNKNOWN
        result = self.joined(alternative)
        if sign.endswith("="):
            self.variables[name] = result
        return result

    # Arithmetic.

    def arithmetic(self, raw: str) -> str:
        """Return the value of an expression of whole numbers, UNKNOWN for another one."""
        try:
            expanded = self.joined(raw)
        except NotClosed:
            return UNKNOWN
        numbers = NAME.sub(lambda match: self.text(match[0]) or "0", expanded)
        try:
            expression = ast.parse(numbers.strip(), mode="eval").body
            return str(_whole_number(expression))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN


_PARAMETER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|[@*])(\[(?P<index>.*?)\])?")
_SLICE = re.compile(r":\s*(?P<start>[0-9]{1,9})(?::\s*(?P<length>[0-9]{1,9}))?")


def _is_digit(char: str) -> bool:
    return len(char) == 1 and char in "0123456789"


def _is_number(text: str) -> bool:
    return 0 < len(text) < 10 and text.isascii() and text.isdigit()


def _items(value: Value) -> list[Word]:
    if isinstance(value, list):
        return value
    texts = value.values() if isinstance(value, dict) else [value]
    return [
        Word(
            text=text,
            line=1,
            span=None,
        )
        for text in texts
    ]


def _joined(items: Sequence[Word]) -> str:
    return " ".join(item.text for item in items)


def _stripped(
    text: str,
    pattern: str,
    *,
    at_front: bool,
    longest: bool,
) -> str:
    """Return the text without the part at one end that matches the pattern."""
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        cut = length if at_front else len(text) - length
        part, remainder = (text[:cut], text[cut:]) if at_front else (text[cut:], text[:cut])
        if fnmatch.fnmatchcase(part, pattern):
            return remainder
    return text


_OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LARGEST = 2**63


def _whole_number(node: ast.expr) -> int:
    result: int | None = None
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_whole_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation = _OPERATIONS[type(node.op)]
        result = operation(_whole_number(node.left), _whole_number(node.right))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        operation = _OPERATIONS.get(type(node.ops[0]), operator.eq)
        result = int(operation(_whole_number(node.left), _whole_number(node.comparators[0])))
    if result is None or abs(result) >= _LARGEST:
        raise ValueError("no whole-number arithmetic")
    return result


# Braces, and ends of quotes and brackets.


_BRACE = re.compile(
    r"\{(?:(?P<first>-?[0-9]{1,6})\.\.(?P<last>-?[0-9]{1,6})"
    r"|(?P<items>[^{}\s'\"$`\\,]*(?:,[^{}\s'\"$`\\,]*)+))\}"
)
MAX_BRACES = 1000  # words that the braces of one word may yield


def brace_expanded(raw: str) -> list[str]:
    """Return the words of `a{1..3}` and `{x,y}`; braces in quotes and in `${...}` stay."""
    if "{" not in raw or re.search(r"['\"$`\\]", raw):
        return [raw]
    parts: list[Sequence[str]] = []  # literal text and choices, alternating
    count = 1
    place = 0
    for match in _BRACE.finditer(raw):
        choices = _choices(match)
        count *= len(choices)
        if count > MAX_BRACES:
            return [raw]
        parts += [[raw[place : match.start()]], choices]
        place = match.end()
    parts.append([raw[place:]])
    return ["".join(combination) for combination in itertools.product(*parts)]


def _choices(match: re.Match[str]) -> Sequence[str]:
    if match["items"] is not None:
        return match["items"].split(",")
    first = int(match["first"])
    last = int(match["last"])
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    return ["", *[""] * MAX_BRACES] if len(numbers) > MAX_BRACES else [str(n) for n in numbers]


class NotClosed(Exception):
    """A quote or bracket without its end."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self.mark = mark


def quote_end(
    text: str,
    mark: str,
    place: int,
) -> int:
    """Return the offset behind the closing mark."""
    while True:
        end = text.find(mark, place)
        if end < 0:
            raise NotClosed(mark)
        if mark == "'" or text[end - 1] != "\\":
            return end + 1
        place = end + 1


def double_quote_end(text: str, place: int) -> int:
    while place < len(text):
        if text[place] == "\\":
            place += 2
        elif text[place] == '"':
            return place + 1
        elif text.startswith(("$(", "${"), place):
            place = bracket_end(text, place + 1)
        else:
            place += 1
    raise NotClosed('"')


def bracket_end(text: str, place: int) -> int:
    """Return the offset behind the bracket that closes the one here."""
    opening = text[place]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 1
        elif char == "'" and opening == "(":
            place = quote_end(text, "'", place + 1) - 1
        elif char == '"' and opening == "(":
            place = double_quote_end(text, place + 1) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    raise NotClosed(opening)
