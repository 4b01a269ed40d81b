"""Text of other programs without codes that control a terminal.

A program's output can move the cursor, rename the window or write the clipboard (OSC 52) of
whoever prints it later, in a terminal or on a page.
"""

from __future__ import annotations

import re

TERMINAL_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # Colours and movements of the cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # Titles, clipboard, device strings
    r"|\x1b[@-Z\\]"
)
_LINE_END = re.compile(r"\r\n?")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def without_terminal_codes(text: str) -> str:
    """Return the text as printed lines: a carriage return begins a new one, control characters
    other than tabs are gone.
    """
    if text.isprintable():
        return text
    lines = _LINE_END.sub("\n", TERMINAL_SEQUENCE.sub("", text))
    return _CONTROL.sub("", lines)
