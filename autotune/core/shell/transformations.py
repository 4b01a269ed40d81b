"""Transformations of a value: `${NAME@Q}`, `${NAME@U}`, `${NAME@L}`, `${NAME@u}`, `${NAME@E}`."""

from __future__ import annotations

from autotune.core.shell.quotes import unescaped


def transformed(
    text: str,
    operation: str,
) -> str | None:
    """Return the text after a transformation; None: it is not read."""
    match operation:
        case "Q" if text and text.isprintable() and text.isascii():
            return "'" + text.replace("'", r"'\''") + "'"
        case "U":
            return text.upper()
        case "u":
            return text[:1].upper() + text[1:]
        case "L":
            return text.lower()
        case "E":
            return unescaped(text)
    return None
