"""Puts broken inputs into one parser and tells what crashed it."""

from __future__ import annotations

import random
from pathlib import Path

from autotune.errors import AutotuneError
from tests.fuzz.parsers import PARSERS


def crashes(name: str, folder: Path, *, seed: int, share: float) -> list[str]:
    """`number: Error: text` for every input that ended in anything but an answer or an error of autotune's."""
    parser, found = PARSERS[name], []
    for number in range(max(1, int(parser.inputs * share))):
        given = parser.make(random.Random(f"{seed}/{name}/{number}"), folder)
        try:
            parser.read(given)
        except AutotuneError as error:
            if not str(error).strip():
                found.append(f"{number}: an error without a word")
        except Exception as error:
            found.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
    return found
