"""Comments of written files: one line each, whatever the text contains."""

from __future__ import annotations

from collections.abc import Iterable


def comment(text: str) -> str:
    """Return `# text` as exactly one line, with its end.

    A line break ends a comment, and YAML also ends it at rarer separators and refuses control
    characters: all of them are written as escapes.
    """
    return f"# {printable(text)}".rstrip() + "\n"


def comments(lines: Iterable[str]) -> str:
    return "".join(comment(line) for line in lines)


def printable(text: str) -> str:
    """Return the text with an escape in place of each character that can't be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
