"""What a rig prints is logged and quoted without what its environment holds in secret, however it is cut into pieces."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autotune.rig.output import OutputLog

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
    said, kept = printed(tmp_path, f"key is {KEY[:cut]}".encode(), f"{KEY[cut:]}, yes\n".encode())
    assert said == "key is ***, yes\n" and kept == said.encode()


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    assert printed(tmp_path, f"dying with {KEY}".encode())[1] == b"dying with ***"


def test_a_long_line_without_gaps_is_not_held_back_for_ever(tmp_path: Path) -> None:
    said, kept = printed(tmp_path, b"x" * 60000, KEY.encode(), b"y" * 60000)
    assert kept == b"x" * 60000 + b"***" + b"y" * 60000
    assert said.endswith("yyy")


def test_bytes_that_are_no_text_stay_as_they_are(tmp_path: Path) -> None:
    assert printed(tmp_path, b"\xff\xfe\x00 ok\n")[1] == b"\xff\xfe\x00 ok\n"


def test_a_mark_gives_what_came_after_it(tmp_path: Path) -> None:
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
