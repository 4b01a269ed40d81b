"""What bash's `printf` makes of a template and its values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autotune.core.shell.quotes import unescaped, unescaped_by_echo

MAX_PRECISION = 15  # digits that doubles and bash's longer numbers have in common
WIDEST_FIELD = 99

_DIRECTIVE = re.compile(
    r"%(?:(?P<percent>%)|(?P<flags>[-+ 0#]*)(?P<width>[0-9]*)"
    r"(?:\.(?P<precision>[0-9]*))?(?P<kind>[sdiuxXofFeEgGcbq]))"
)
_WHOLE = "diuxXo"
_FLOATS = "fFeEgG"
_NOT_PLAIN = re.compile(r"([^\w./:=%+@-])", re.ASCII)


def printed_text(
    template: str,
    values: Sequence[str],
) -> str | None:
    """Return what `printf` prints; None for a template or a value that is not read.

    The template is repeated until no value is left; values that are missing are empty or 0.
    """
    directives = [match for match in _DIRECTIVE.finditer(template) if match["kind"]]
    if "%" in _DIRECTIVE.sub("", template) or not all(map(_is_small, directives)):
        return None
    rounds = 1
    if directives:
        rounds = max(1, -(-len(values) // len(directives)))
    remaining = iter(values)
    try:
        return "".join(_one_round(template, remaining) for _ in range(rounds))
    except (ValueError, OverflowError):
        return None


def _is_small(directive: re.Match[str]) -> bool:
    is_octal_with_sign = directive["kind"] == "o" and "#" in directive["flags"]
    width = int(directive["width"] or 0)
    precision = int(directive["precision"] or 0)
    return width <= WIDEST_FIELD and precision <= MAX_PRECISION and not is_octal_with_sign


def _one_round(template: str, values: Iterator[str]) -> str:
    parts: list[str] = []
    place = 0
    for match in _DIRECTIVE.finditer(template):
        parts.append(unescaped(template[place : match.start()]))
        if match["percent"]:
            parts.append("%")
        else:
            parts.append(_printed(match, next(values, None)))
        place = match.end()
    parts.append(unescaped(template[place:]))
    return "".join(parts)


def _printed(directive: re.Match[str], text: str | None) -> str:
    """Return one value as its directive prints it; None: no value is left."""
    kind = directive["kind"]
    value: str | int | float = text or ""
    if kind in _WHOLE:
        value = _whole(text)
        if value < 0 and kind not in "di":
            raise ValueError("a number below 0 as one of 64 bits without a sign")
    elif kind in _FLOATS:
        value = float(text or 0)
    elif kind == "c":
        value = (text or "")[:1]
    elif kind == "b":
        value = _with_escapes(text or "")
    elif kind == "q":
        value = quoted(text or "")
    precision = directive["precision"]
    python_kind = kind.replace("u", "d")
    if isinstance(value, str):
        python_kind = "s"
    spelled = f"%{directive['flags']}{directive['width']}"
    if precision is not None:
        spelled += f".{precision}"
    printed: str = f"{spelled}{python_kind}" % value
    return printed


def _with_escapes(text: str) -> str:
    """Return the text of `%b`, which takes `\\101` for a character, as `echo -e` does not."""
    if re.search(r"\\[1-7]", text):
        raise ValueError("an octal number without a 0")
    return unescaped_by_echo(text)


def _whole(text: str | None) -> int:
    """Return a whole number in C's spelling: `010` has the base 8, `'a` is a character's code."""
    if not text:
        return 0
    if text[0] in "'\"":
        return ord(text[1:2] or "\0")
    digits = text.lstrip("+-")
    if not re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]+", digits):
        raise ValueError(f"{text} is no whole number")
    if digits[:2] in ("0x", "0X"):
        return int(text, 16)
    base = 10
    if digits[0] == "0":
        base = 8
    return int(text, base)


def quoted(text: str) -> str:
    """Return a text as `%q` prints it: with a backslash before each other character."""
    if not text:
        return "''"
    if not text.isprintable() or not text.isascii() or "#" in text or "~" in text:
        raise ValueError("these characters are not quoted here")
    return _NOT_PLAIN.sub(r"\\\1", text)
