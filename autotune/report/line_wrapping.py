"""Line wrapping at a terminal, with continuation lines indented below the text, not below its label."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LABEL_COLUMNS = 9
_LABEL = re.compile(r"[a-z]+ +")


def print_line(console: Console, text: str) -> None:
    """Print one line, wrapped on a terminal and unchanged in a pipe."""
    if console.soft_wrap or len(text) <= console.width:
        console.print(text)
        return
    label = _LABEL.match(text)
    columns = LABEL_COLUMNS if label and label.end() == LABEL_COLUMNS else len(text) - len(text.lstrip()) + 4
    console.print(textwrap.fill(text, console.width, subsequent_indent=" " * columns, break_on_hyphens=False), soft_wrap=True)


def shorten(text: str, max_length: int) -> str:
    """Shorten to a number of characters, at a word, with an ellipsis."""
    return text if len(text) <= max_length else f"{text[:max_length].rsplit(None, 1)[0]} ..."
