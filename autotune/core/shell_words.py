"""Words of a shell script, expanded as bash does: quotes, variables, arrays, arithmetic.

A word's text comes from the syntax tree (`shell_script`); what its quotes and dollars mean is
computed here. Nothing is executed: text that only a run can yield is one character, UNKNOWN. A
variable that is not set is empty, as in bash, and the word names it.

Expansion has a budget: a script of few lines can double a variable until no memory is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autotune.core.shell_arithmetic import ShellNumber, Variables, formula_value
from autotune.core.shell_budget import Budget
from autotune.core.shell_patterns import replaced_text, replacement
from autotune.core.shell_quotes import (
    NotClosed,
    brace_expanded,
    bracket_end,
    double_quote_end,
    escaped_quote_end,
    quote_end,
    stripped,
    unescaped,
)
from autotune.core.shell_unset import mark_of, names_in, plain, with_references
from autotune.core.shell_values import (
    BLANKS,
    NAME,
    UNKNOWN,
    Piece,
    Value,
    Word,
    fields_of,
    items_of,
    joined_text,
    words_from,
)


@dataclass
class Expansion:
    """Variables and arguments of a run, and the words that they yield."""

    arguments: list[str]
    variables: dict[str, Value]
    script: str = UNKNOWN  # path of the script, `$0`
    budget: Budget = field(default_factory=Budget)
    output_of: Callable[[str], str] = lambda command: UNKNOWN
    """Return what a command in `$(...)` prints."""

    missing: tuple[str, ...] = ()
    """Variables without a value in place of words before the first one of the last expansion."""

    @property
    def separators(self) -> str:
        """Characters at which unquoted variables are split, `$IFS`."""
        if "IFS" not in self.variables:
            return BLANKS
        separators = self.text("IFS")
        if UNKNOWN in separators:
            return BLANKS
        return separators

    # Words.

    def words(
        self,
        raw: str,
        line: int,
        span: tuple[int, int] | None,
    ) -> list[Word]:
        """Return the words of one word of the script: unquoted variables are split at blanks, and
        an array yields a word for each of its items.
        """
        self.missing = ()
        expanded: list[Word] = []
        for text in brace_expanded(raw):
            expanded += self._split(list(self._pieces(text)), line, span)
        self.budget.spend(words=len(expanded), text=sum(len(word.text) for word in expanded))
        return expanded

    def joined(self, raw: str) -> str:
        """Return the text of a place where nothing is split."""
        return plain(self.assigned(raw))

    def assigned(self, raw: str) -> str:
        """Return the text that an assignment gives a variable, with marks of unset ones."""
        parts: list[str] = []
        for piece in self._pieces(raw):
            text = piece.value if isinstance(piece.value, str) else joined_text(piece.value)
            self.budget.spend(text=len(text))
            parts.append(text)
        return "".join(parts)

    def text(self, name: str) -> str:
        """Return a variable as one text; that of an array is its first item."""
        return plain(self._marked(name))

    def _marked(self, name: str) -> str:
        if name not in self.variables:
            if name == "IFS":
                return BLANKS
            return mark_of(name)
        value = self.variables[name]
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return value.get("0", "")
        return value[0].text if value else ""

    def _split(
        self,
        pieces: Sequence[Piece],
        line: int,
        span: tuple[int, int] | None,
    ) -> list[Word]:
        # 1. Fields, each a list of parts: blanks of unquoted text and items of arrays end one.
        fields: list[list[str]] = [[]]
        items: list[list[Word]] = [[]]  # whole items of arrays in each field
        quoted = [False]  # whether quotes keep the field, even if it is empty
        for piece in pieces:
            if isinstance(piece.value, list):
                if not piece.quoted:
                    piece = replace(piece, value=self._split_items(piece.value))
                parts = [item.text for item in items_of(piece.value)]
            elif piece.quoted:
                parts = [piece.value]
            else:
                parts = fields_of(piece.value, self.separators)
            for index, part in enumerate(parts):
                if index:
                    fields.append([])
                    items.append([])
                    quoted.append(False)
                quoted[-1] |= piece.quoted
                if part or piece.quoted or isinstance(piece.value, list):
                    fields[-1].append(part)
                    if isinstance(piece.value, list):
                        items[-1].append(piece.value[index])

        # 2. Words. A whole item of an array keeps the place where it is written.
        filled = [index for index, parts in enumerate(fields) if parts]
        expanded: list[Word] = []
        for index in filled:
            is_item = len(fields[index]) == 1 and len(items[index]) == 1
            if is_item and items[index][0].span is not None:
                expanded.append(items[index][0])
                continue
            marked = "".join(fields[index])
            text = plain(marked)
            unset = names_in(marked)
            if unset and not text and not quoted[index]:
                self._note_missing(expanded, unset)
                continue
            word = Word(
                text=text,
                line=line,
                span=span if len(filled) == 1 else None,
                unset=unset,
                for_shell=with_references(marked) if unset else "",
            )
            expanded.append(word)
        return expanded

    def _split_items(self, items: Sequence[Word]) -> list[Word]:
        """Return the words of an array outside quotes: items with blanks are several."""
        separators = self.separators
        split: list[Word] = []
        for item in items:
            fields = list(filter(None, fields_of(item.text, separators)))
            if fields == [item.text]:
                split.append(item)
            else:
                split += words_from(fields)
        return split

    def _note_missing(self, expanded: list[Word], names: tuple[str, ...]) -> None:
        """Note that no word is made of these variables, at the word before them."""
        if not expanded:
            self.missing += names
            return
        last_word = expanded[-1]
        expanded[-1] = replace(last_word, missing=(*last_word.missing, *names))

    # Quotes.

    def _pieces(self, raw: str, *, in_quotes: bool = False) -> Iterator[Piece]:
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
                yield Piece(literal, in_quotes)
                literal = ""
            yield from pieces
            place = end
        if literal:
            yield Piece(literal, in_quotes)

    def _special(
        self,
        raw: str,
        place: int,
        in_quotes: bool,
    ) -> tuple[int, list[Piece] | None]:
        """Return the end and the value of a quote or an expansion here; None for a plain
        character.
        """
        char = raw[place]
        following = raw[place + 1 : place + 2]
        if char == "\\" and following and (not in_quotes or following in '"\\$`\n'):
            return place + 2, [] if following == "\n" else [Piece(following, True)]
        if char in "$`" and not (char + following == "$'" and not in_quotes):
            value, end = self._dollar(raw, place)
            if in_quotes and isinstance(value, list) and _ONE_WORD.match(raw, place):
                value = self.separators[:1].join(item.text for item in value)
            return end, [Piece(value, in_quotes)]
        if in_quotes:
            return place, None
        if char == "'":
            end = quote_end(raw, "'", place + 1)
            return end, [Piece(raw[place + 1 : end - 1], True)]
        if char == '"':
            end = double_quote_end(raw, place + 1)
            inner = list(self._pieces(raw[place + 1 : end - 1], in_quotes=True))
            return end, inner or [Piece("", True)]
        if char + following == "$'":
            end = escaped_quote_end(raw, place + 2)
            return end, [Piece(unescaped(raw[place + 2 : end - 1]), True)]
        if char == "~" and place == 0 and following in ("", "/"):
            return 1, [Piece(self.text("HOME"), True)]
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
                return self.computed(raw[place + 3 : end - 2]), end
            inner = raw[place + 2 : end - 1]
            return (self._output(inner) if following == "(" else self._braces(inner)), end
        if following == "[" and "]" in raw[place:]:
            end = raw.index("]", place)
            return self.computed(raw[place + 2 : end]), end + 1
        if following in ("@", "*") or _is_digit(following):
            return self._argument(following), place + 2
        if following == "#":
            return str(len(self.arguments)), place + 2
        if following in ("?", "$", "!", "-"):
            return UNKNOWN, place + 2
        match = NAME.match(raw, place + 1)
        if match is None:
            return "$", place + 1
        return self._marked(match[0]), match.end()

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
        return mark_of(name)

    def _braces(self, inner: str) -> str | list[Word]:
        """Return the value of `${inner}`."""
        if inner.startswith("#"):
            return self._length(inner[1:])
        if inner.startswith("!"):
            return self._indirect(inner[1:])
        match = _PARAMETER.match(inner)
        if match is None:
            return UNKNOWN
        name = match["name"]
        index = match["index"]
        operation = inner[match.end() :]
        value = self._parameter(name, index)
        if not operation:
            return value
        # Operators such as `:-` say what an unset variable means.
        return self._modified(name, plain(value) if isinstance(value, str) else value, operation)

    def _parameter(self, name: str, index: str | None) -> str | list[Word]:
        if name in ("@", "*") or name.isdigit():
            return self._argument(name)
        if index is None:
            return self.script if name == "BASH_SOURCE" else self._marked(name)
        if name == "BASH_SOURCE":
            return self.script
        value = self.variables.get(name, [])
        if index in ("@", "*"):
            return items_of(value)
        if isinstance(value, dict):
            return plain(value.get(self.joined(index), ""))
        return self._item(items_of(value), self.arithmetic(index))

    def _item(self, items: Sequence[Word], number: str) -> str:
        """Return an item by its number; negative ones count from the end."""
        if UNKNOWN in number or _has_unknown_length(items):
            return UNKNOWN
        place = int(number)
        if place < 0:
            place += len(items)
        if not 0 <= place < len(items):
            return ""
        return items[place].text

    def _length(self, name: str) -> str:
        if name in ("@", "*"):
            return str(len(self.arguments))
        match = _PARAMETER.fullmatch(name)
        if match is not None and match["index"] in ("@", "*"):
            items = items_of(self.variables.get(match["name"], []))
            if _has_unknown_length(items):
                return UNKNOWN
            return str(len(items))
        text = self.text(name)
        if UNKNOWN in text:
            return UNKNOWN
        return str(len(text))

    def _indirect(self, name: str) -> str | list[Word]:
        """Return `${!NAME}`, the variable that a variable names, or `${!TABLE[@]}`, its keys."""
        match = _PARAMETER.fullmatch(name)
        if match is None:
            return UNKNOWN
        value = self.variables.get(match["name"], [])
        if match["index"] in ("@", "*"):
            if isinstance(value, dict):
                return words_from(value)
            places = range(len(items_of(value)))
            return words_from(map(str, places))
        target = self.text(match["name"])
        if not NAME.fullmatch(target):
            return UNKNOWN
        return self._marked(target)

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
        for sign in (":-", ":=", ":+", ":?", "-", "=", "+", "?"):
            if operation.startswith(sign):
                return self._defaulted(name, value, sign, operation[len(sign) :])
        if isinstance(value, str):
            return self._edited(value, operation)
        return words_from(self._edited(item.text, operation) for item in value)

    def _edited(self, text: str, operation: str) -> str:
        """Return the text without a part, with another part, or in other letters."""
        for sign in ("##", "#", "%%", "%"):
            if operation.startswith(sign):
                pattern = self.joined(operation[len(sign) :])
                return stripped(text, pattern, at_front=sign[0] == "#", longest=len(sign) == 2)
        if operation.startswith("/"):
            change = replacement(operation)
            new = self.joined(change.new)
            replaced = replaced_text(text, change, self.joined(change.old), new)
            if replaced is None:
                return UNKNOWN
            self.budget.spend(text=len(replaced))
            return replaced
        first_letter = text[:1]
        remainder = text[1:]
        cases = {
            ",,": text.lower(),
            "^^": text.upper(),
            ",": first_letter.lower() + remainder,
            "^": first_letter.upper() + remainder,
        }
        return cases.get(operation, UNKNOWN)

    def _sliced(
        self,
        name: str,
        value: str | list[Word],
        start_text: str,
        length_text: str | None,
    ) -> str | list[Word]:
        if isinstance(value, list) and _has_unknown_length(value):
            return value
        start = int(start_text)
        if start < 0:
            start = max(0, start + len(value))
        elif isinstance(value, list) and name in ("@", "*"):
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
            return self.assigned(alternative) if is_present else ""
        if is_present:
            return value
        if sign.endswith("?"):
            return UNKNOWN
        result = self.assigned(alternative)
        if sign.endswith("="):
            self.variables[name] = result
        return result

    # Arithmetic.

    def arithmetic(self, raw: str, *, certain: bool = True) -> str:
        """Return the value of an expression of whole numbers, UNKNOWN for another one."""
        return plain(self.computed(raw, certain=certain))

    def computed(self, raw: str, *, certain: bool = True) -> str:
        """Return the value of an expression, with marks of unset variables: they count as 0.

        What it assigns is known if the expression is `certain` to be reached.
        """
        try:
            expanded = self.assigned(raw)
        except NotClosed:
            return UNKNOWN
        names = list(names_in(expanded))

        def read(name: str) -> ShellNumber:
            marked = self._marked(name)
            names.extend(names_in(marked))
            return _number_in(plain(marked))

        def write(name: str, number: ShellNumber) -> None:
            if not certain:
                number = None
            self.variables[name] = _text_of_number(number, names)

        formula = plain(expanded)
        try:
            if UNKNOWN in formula:
                raise ValueError("a part of the expression is not known")
            number = formula_value(formula, Variables(read=read, write=write))
        except (ValueError, ZeroDivisionError, RecursionError):
            self._forget(formula)
            number = None
        return _text_of_number(number, names)

    def _forget(self, formula: str) -> None:
        """Forget what an expression assigns that has no value here."""
        for match in _ASSIGNED.finditer(formula):
            self.variables[match["name"] or match["counted"]] = UNKNOWN


def _text_of_number(number: ShellNumber, names: Sequence[str]) -> str:
    """Return a computed number as a text, with marks of the unset variables that it needs."""
    marks = "".join(mark_of(name) for name in names)
    if number is None:
        return f"{UNKNOWN}{marks}"
    return f"{number}{marks}"


def _number_in(text: str) -> ShellNumber:
    """Return the number that the text of a variable is; an empty one counts as 0."""
    if not text.strip():
        return 0
    if UNKNOWN in text:
        return None

    def read(name: str) -> ShellNumber:
        raise ValueError(f"the value of {name} is not looked up")

    def write(name: str, number: ShellNumber) -> None:
        raise ValueError(f"{name} is not assigned in a value")

    return formula_value(text, Variables(read=read, write=write))


def _has_unknown_length(items: Sequence[Word]) -> bool:
    """Return True if one of the items stands for words that only a run has."""
    return any(item.text == UNKNOWN for item in items)


_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_]\w*)\s*(?:<<|>>|[-+*/%&^|])?=(?!=)"
    r"|(?:\+\+|--)?(?P<counted>[A-Za-z_]\w*)\s*(?:\+\+|--)"
)
_ONE_WORD = re.compile(r"\$(?:\*|\{(?:\*|[A-Za-z_]\w*\[\*\]))")
"""`$*`, `${*}` and `${A[*]}`: one word between quotes."""

_PARAMETER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|[@*])(\[(?P<index>.*?)\])?")
_SLICE = re.compile(r":\s*(?P<start>[0-9]{1,9}|(?<=\s)-[0-9]{1,9})(?::\s*(?P<length>[0-9]{1,9}))?")


def _is_digit(char: str) -> bool:
    return len(char) == 1 and char in "0123456789"
