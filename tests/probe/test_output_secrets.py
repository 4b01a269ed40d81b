"""Output of a worker is logged and quoted without the secrets of its environment, in whatever pieces it arrives."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autotune.probe.spawn import OutputLog

KEY = "0123456789abcdef-very-secret"


def printed(tmp_path: Path, *pieces: bytes) -> tuple[str, bytes]:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {"WANDB_API_KEY": KEY})
    end = os.dup(log.write_end)
    log.start()
    for piece in pieces:
        os.write(end, piece)
        time.sleep(0.02)
    while_open = log.since(0)
    os.close(end)
    log.close()
    assert KEY not in while_open
    return log.since(0), (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("cut", [1, 5, len(KEY) - 1, len(KEY)])
def test_a_secret_that_comes_in_two_pieces(tmp_path: Path, cut: int) -> None:
    text, logged = printed(tmp_path, f"key is {KEY[:cut]}".encode(), f"{KEY[cut:]}, yes\n".encode())
    assert text == "key is ***, yes\n" and logged == text.encode()


def test_last_line_without_line_feed_is_written(tmp_path: Path) -> None:
    assert printed(tmp_path, f"dying with {KEY}".encode())[1] == b"dying with ***"


def test_long_line_without_gaps_is_written(tmp_path: Path) -> None:
    text, logged = printed(tmp_path, b"x" * 60000, KEY.encode(), b"y" * 60000)
    assert logged == b"x" * 60000 + b"***" + b"y" * 60000
    assert text.endswith("yyy")


def test_undecodable_bytes_are_unchanged(tmp_path: Path) -> None:
    assert printed(tmp_path, b"\xff\xfe\x00 ok\n")[1] == b"\xff\xfe\x00 ok\n"


def test_since_returns_the_output_after_a_mark(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {})
    end = os.dup(log.write_end)
    log.start()
    os.write(end, b"before")
    log.settle()
    time.sleep(0.05)
    mark = log.mark()
    os.write(end, b"after\n")
    os.close(end)
    log.close()
    assert log.since(mark) == "after\n"


def test_a_private_key_that_comes_line_by_line(tmp_path: Path) -> None:
    lines = [
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
        b"b3BlbnNzaC1rZXktdjEAAAAA\n",
        b"AAtzc2gtZW\n",
        b"-----END OPENSSH PRIVATE KEY-----\n",
    ]
    assert printed(tmp_path, b"before\n", *lines, b"after\n") == ("before\n***\nafter\n", b"before\n***\nafter\n")


def test_a_password_with_other_letters(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", tmp_path / "log.1", {"DB_PASS": "pässwörter"})
    end = os.dup(log.write_end)
    log.start()
    for piece in ("a päs".encode()[:-2], "a päs".encode()[-2:], "swörter b\n".encode()):
        os.write(end, piece)
        time.sleep(0.02)
    os.close(end)
    log.close()
    assert (tmp_path / "log").read_text() == "a *** b\n"
