"""Codes that a terminal would obey, in the output of a probed program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.core.plain_text import without_terminal_codes
from autotune.core.secrets import Secrets
from autotune.probe.message_validation import valid_messages

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"  # OSC 52 writes the clipboard


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (f"before{CLIPBOARD}after", "beforeafter"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x9b31mred", "31mred"),  # The same introducer in one byte
        ("10%\r20%\r\n30%\n", "10%\n20%\n30%\n"),
        ("a\bb\x00c\x7f", "abc"),
        ("tab\tumlaut ü 表", "tab\tumlaut ü 表"),
        ("\x1b", ""),
    ],
)
def test_printed_codes_are_removed(printed: str, shown: str) -> None:
    assert without_terminal_codes(printed) == shown


def test_the_texts_of_a_rank_are_plain() -> None:
    message = {"event": "failed", "rank": 0, "error": {"type": "E", "text": f"no{CLIPBOARD}"}}
    (received,) = valid_messages([message], Secrets({}))
    assert received["error"]["text"] == "no"


def test_a_long_unfinished_sequence_takes_no_quadratic_time() -> None:
    program = (
        "from autotune.core.plain_text import without_terminal_codes as plain;"
        "plain('\\x1b]' * 500_000); plain('\\x1b[' + '0' * 1_000_000)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
