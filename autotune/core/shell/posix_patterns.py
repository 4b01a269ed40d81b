"""Regular expressions of `sed`, `grep` and `expr` in Python's spelling.

Basic expressions have `\\(`, `\\{` and `\\+` where extended ones have `(`, `{` and `+`. What the
two languages match in another way, and what may take long, is not read: `compiled` returns None.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from autotune.core.shell.extended_patterns import no_text_begins_another
from autotune.core.shell.patterns import CHARACTER_CLASSES

MAX_PATTERN = 200
MOST_KEPT_PATTERNS = 64  # `sed` asks for the same ones at every line
MOST_SEARCH_STEPS = 4 * 10**6
"""Characters of a line to the power of the repeated parts: about what a search looks at."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|[^\]])*\]|.", re.DOTALL)
_SPECIAL = "(){}+?|"  # which a backslash turns into the other meaning
_CLASSES = {**CHARACTER_CLASSES, "[:space:]": r"\s", "[:blank:]": r" \t"}
_ESCAPED = {"w": r"\w", "s": r"\s", "S": r"\S", "W": r"\W", "b": r"\b", "n": r"\n", "t": r"\t"}
_REPEATED = ("*", "+", "?", "{")
_NOT_PLAIN = re.compile(r"[^\w\\./:-]|(?<!\\)\.")


@functools.lru_cache(maxsize=MOST_KEPT_PATTERNS)
def compiled(
    pattern: str,
    *,
    is_extended: bool,
    longest_text: int,
) -> re.Pattern[str] | None:
    """Return the pattern for texts of this length; None: it is not read."""
    if len(pattern) > MAX_PATTERN:
        return None
    pieces = list(_pieces(pattern, is_extended))
    if None in pieces:
        return None
    read_pieces = [piece for piece in pieces if piece is not None]
    repeats = sum(piece in ("*", "+", "{") for piece in read_pieces)
    if longest_text**repeats > MOST_SEARCH_STEPS or not _is_alike(read_pieces):
        return None
    try:
        return re.compile("".join(read_pieces), re.ASCII)
    except (re.error, OverflowError):
        return None


def _pieces(
    pattern: str,
    is_extended: bool,
) -> Iterator[str | None]:
    """Yield the parts in Python's spelling; None for one that is not read."""
    for place, match in enumerate(_PIECE.finditer(pattern)):
        piece = match[0]
        is_escaped = len(piece) == 2 and piece[0] == "\\"
        char = piece[-1]
        if piece[0] == "[" and len(piece) > 1:
            yield _bracket(piece)
        elif char in _SPECIAL:
            is_character = is_escaped is is_extended
            yield "\\" * is_character + char
        elif is_escaped and char.isalnum():
            yield _ESCAPED.get(char)
        elif is_escaped:
            yield re.escape(char)
        elif piece == "*" and not place:
            yield r"\*"
        elif piece == "^":
            # Elsewhere a basic expression takes it for a character.
            yield {0: "^"}.get(place)
        elif piece == "$":
            yield {len(pattern): r"\Z"}.get(match.end())
        elif piece in ".*":
            yield piece
        else:
            yield re.escape(piece)


def _bracket(piece: str) -> str | None:
    inner = piece[1:-1]
    for name, characters in _CLASSES.items():
        inner = inner.replace(name, characters)
    if "[:" in inner or "[." in inner or "[=" in inner:
        return None
    characters = inner.removeprefix("^")
    sign = inner.removesuffix(characters)
    inner = characters.replace("[", r"\[").replace("&&", r"&\&")
    if "\\" in piece:
        return None  # a character of its own there, an escape in Python
    if inner.startswith("]"):
        inner = rf"\]{inner[1:]}"
    return f"[{sign}{inner}]"


def _is_alike(pieces: list[str]) -> bool:
    """Return False where Python may match another part: it takes the first alternative, POSIX the
    longest one, and repeats of repeats take long.
    """
    depth = 0
    has_repeat = [False]
    for place, piece in enumerate(pieces):
        if piece == "(":
            has_repeat.append(False)
            depth += 1
        elif piece == ")":
            if not depth:
                return False
            depth -= 1
            inner = has_repeat.pop()
            following = pieces[place + 1 : place + 2]
            if following and following[0] in _REPEATED and inner:
                return False
            has_repeat[-1] |= inner
        elif piece in _REPEATED or piece == "|":
            before = pieces[max(0, place - 1)]
            if place and piece in _REPEATED and before in (*_REPEATED, "}"):
                return False  # `*?` is another thing in Python
            has_repeat[-1] = True
    return "|" not in pieces or _are_plain_alternatives("".join(pieces))


def _are_plain_alternatives(expression: str) -> bool:
    """Return True if no alternative is the beginning of another one, and none has a pattern."""
    for group in re.split(r"[()]", expression):
        alternatives = group.split("|")
        if len(alternatives) < 2:
            continue
        if any(map(_NOT_PLAIN.search, alternatives)) or not no_text_begins_another(alternatives):
            return False
    return True
