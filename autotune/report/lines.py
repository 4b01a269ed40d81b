"""Long lines at a terminal: what goes on below stands under the words, not under their label."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LABEL_COLUMNS = 9
_LABEL = re.compile(r"[a-z]+ +")


def tell(console: Console, text: str) -> None:
    """One line; into a pipe as it is, for programs to read."""
    if console.soft_wrap or len(text) <= console.width:
        console.print(text)
        return
    indent = " " * _indent(text)
    console.print(textwrap.fill(text, console.width, subsequent_indent=indent, break_on_hyphens=False), soft_wrap=True)


def _indent(text: str) -> int:
    label = _LABEL.match(text)
    return LABEL_COLUMNS if label and label.end() == LABEL_COLUMNS else len(text) - len(text.lstrip()) + 4


def cut(words: str, most: int) -> str:
    """No longer than so many letters, at the end of a word, and said to be cut."""
    return words if len(words) <= most else f"{words[:most].rsplit(None, 1)[0]} ..."
