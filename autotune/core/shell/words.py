"""Words of a shell script, expanded as bash does: quotes, variables, arrays, arithmetic.

A word's text comes from the syntax tree (`script`); what its quotes and dollars mean is
computed here. Nothing is executed: text that only a run can yield is one character, UNKNOWN. A
variable that is not set is empty, as in bash, and the word names it.

Expansion has a budget: a script of few lines can double a variable until no memory is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.core.shell.braces import brace_expanded
from autotune.core.shell.parameter_expansion import ShellParameters
from autotune.core.shell.patterns import literal_pattern
from autotune.core.shell.quotes import (
    bracket_end,
    double_quote_end,
    escaped_quote_end,
    quote_end,
    unescaped,
    without_escapes,
)
from autotune.core.shell.unset import mark_of, names_in, plain, with_references
from autotune.core.shell.variable_values import (
    NAME,
    UNKNOWN,
    Alternative,
    Piece,
    Word,
    fields_of,
    items_of,
    joined_text,
    words_from,
)


class Expansion(ShellParameters):
    """Words that variables and arguments of a run yield."""

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
        if _PLAIN_WORD.fullmatch(raw):
            self.budget.spend(words=1, text=len(raw))
            return [Word(text=raw, line=line, span=span)]
        expanded: list[Word] = []
        for text in brace_expanded(raw):
            expanded += self._split(list(self._pieces(text)), line, span)
        self.budget.spend(words=len(expanded), text=sum(len(word.text) for word in expanded))
        return [self._explained(word, raw) for word in expanded]

    def _explained(self, word: Word, raw: str) -> Word:
        """Return the word with the reason why it is not known, if it is not."""
        if UNKNOWN not in word.text or word.unknown:
            return word
        return replace(word, unknown=self.why_unknown(raw))

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

    def pattern(self, raw: str) -> str:
        """Return the pattern of a place where one may stand: quoted stars are characters."""
        parts: list[str] = []
        for piece in self._pieces(raw):
            text = piece.value if isinstance(piece.value, str) else joined_text(piece.value)
            parts.append(literal_pattern(text) if piece.quoted else text)
        return plain("".join(parts))

    def _split(
        self,
        pieces: Sequence[Piece],
        line: int,
        span: tuple[int, int] | None,
    ) -> list[Word]:
        # 1. Fields, each a list of parts: blanks of unquoted text and items of arrays end one.
        fields: list[list[str]] = [[]]
        items: list[list[Word]] = [[]]  # whole items of arrays in each field
        patterns = [""]  # each field, with its quoted stars as characters
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
                    patterns.append("")
                    quoted.append(False)
                patterns[-1] += literal_pattern(plain(part)) if piece.quoted else part
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
            if _GLOB.search(patterns[index]):
                names = self.paths_matching(plain(patterns[index]))
                if names:
                    expanded += [Word(text=name, line=line, span=None) for name in names]
                    continue
                if self.drops_patterns():
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

    def _note_missing(
        self,
        expanded: list[Word],
        names: tuple[str, ...],
    ) -> None:
        """Note that no word is made of these variables, at the word before them."""
        if not expanded:
            self.missing += names
            return
        last_word = expanded[-1]
        expanded[-1] = replace(last_word, missing=(*last_word.missing, *names))

    # Quotes.

    def _pieces(
        self,
        raw: str,
        *,
        in_quotes: bool = False,
    ) -> Iterator[Piece]:
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
            if isinstance(value, Alternative):
                return end, self._alternative(value.raw, in_quotes)
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
        is_tilde = char == "~" and following in ("", "/")
        if is_tilde and (place == 0 or _ASSIGNED_NAME.fullmatch(raw[:place])):
            return place + 1, [Piece(self.text("HOME"), True)]
        return place, None

    # Dollars.

    def _alternative(
        self,
        raw: str,
        in_quotes: bool,
    ) -> list[Piece]:
        """Return the parts of `${NAME:-alternative}`: between double quotes, single ones stay."""
        if in_quotes:
            raw = _DOUBLE_QUOTE.sub("", raw).replace("\\}", "}")
        pieces = list(self._pieces(raw, in_quotes=in_quotes))
        return pieces or [Piece("", in_quotes)]

    def _dollar(
        self,
        raw: str,
        place: int,
    ) -> tuple[str | list[Word] | Alternative, int]:
        """Return the value of `$...` or of backquotes here, and its end."""
        if raw[place] == "`":
            end = quote_end(raw, "`", place + 1)
            return self._output(without_escapes(raw[place + 1 : end - 1])), end
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
            value = self._argument(following)
            if value == mark_of(following):
                self.note_unset(following)
            return value, place + 2
        if following == "#":
            return str(len(self.arguments)), place + 2
        if following == "?":
            return self.last_status, place + 2
        if following in ("$", "!", "-"):
            return UNKNOWN, place + 2
        match = NAME.match(raw, place + 1)
        if match is None:
            return "$", place + 1
        return self._used(match[0]), match.end()

    def _output(self, command: str) -> str:
        if self.budget.nesting <= 0:
            return UNKNOWN
        missing = self.missing
        self.budget.nesting -= 1
        try:
            return self.output_of(command)
        finally:
            self.budget.nesting += 1
            self.missing = missing


_PLAIN_WORD = re.compile(r"[\w./:=,%+@-]+")
"""Word that means itself: nothing in it is expanded, and it is not split."""

_GLOB = re.compile(r"[*?]|\[[^\]]+\]")
_DOUBLE_QUOTE = re.compile(r'(?<!\\)"')
_ASSIGNED_NAME = re.compile(r"[A-Za-z_]\w*=")
_ONE_WORD = re.compile(r"\$(?:\*|\{(?:\*|[A-Za-z_]\w*\[\*\]))")
"""`$*`, `${*}` and `${A[*]}`: one word between quotes."""


def _is_digit(char: str) -> bool:
    return len(char) == 1 and char in "0123456789"
