"""Driver that passes broken inputs to one parser and reports crashes."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from autotune.core.errors import AutotuneError
from tests.fuzz.parsers import PARSERS, Parser

MAX_CPU_SECONDS = 1.0
"""Processor time for one input, so that a busy machine does not count."""

MAX_GROWTH_BYTES = 200 * 2**20


class _TooLong(BaseException):
    """No Exception, so that no parser can catch it."""


def crashes(
    name: str,
    folder: Path,
    *,
    seed: int,
    share: float,
) -> list[str]:
    """`number: Error: text` for every input that ended in anything but an answer or an error of
    autotune's, or late, or in too much memory.
    """
    parser, failures = PARSERS[name], []
    for number in range(max(1, int(parser.inputs * share))):
        content = parser.make(random.Random(f"{seed}/{name}/{number}"), folder)
        before = peak_bytes()
        try:
            _read_in_time(parser, content)
        except _TooLong:
            failures.append(f"{number}: more than {MAX_CPU_SECONDS:.0f} s")
        except AutotuneError as error:
            if not str(error).strip():
                failures.append(f"{number}: an error without a word")
        except Exception as error:
            failures.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
        if (growth := peak_bytes() - before) > MAX_GROWTH_BYTES:
            failures.append(f"{number}: {growth >> 20} MiB")
    return failures


def _read_in_time(parser: Parser, content: object) -> None:
    """Read it, once more if it took too long: imports of a first use are not an input's time."""
    try:
        with limited():
            parser.read(content)
    except _TooLong:
        with limited():
            parser.read(content)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise _TooLong

    previous = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
