"""Anything may be in a log. It is read once, in bounded memory, and never brings the reader
down.
"""

from __future__ import annotations

import io
import json
import signal
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.diagnosis import Diagnosis, as_document, diagnose, diagnose_lines
from autotune.diagnosis.log_files import LONGEST_LINE, lines_of
from autotune.failures.table import CAUSES
from tests.diagnosis.around import FRAMES, NAMES, SHAPES, raised, sample

TELLING = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in f',
    "    x = y",
    "ValueError: no",
    "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f()",
    "Exception ignored in: f",
    "During handling of the above exception, another exception occurred:",
    "Root Cause (first observed failure):",
    "Failures:",
    "====",
    "      rank      : 1 (local_rank: 1)",
    "CUDA out of memory. Tried to allocate 1.2.3 GiB. GPU 0 has a total capacity of ",
    "{'loss': 0.1}",
    "{'train_runtime': 1}",
    "Killed",
]
AROUND = [
    "\n",
    "\r",
    "\r\n",
    "[rank1]: ",
    "[rank",
    "(",
    "(WorkerDict pid=1) ",
    "ERROR 11-20 18:14:10 [a.py:1] ",
    "\x1b[31m",
    "\x1b[",
    "\x00",
    "\ud800",
]
PIECES = st.sampled_from([*AROUND, *TELLING, *(sample(name) for name in NAMES)])


def check(diagnosis: Diagnosis) -> None:
    assert diagnosis.known == (diagnosis.cause is not None)
    assert diagnosis.cause is None or diagnosis.cause in CAUSES
    assert len(diagnosis.evidence) <= 600 and diagnosis.evidence.isprintable()
    diagnosis.evidence.encode()
    json.loads(json.dumps(as_document(diagnosis)))


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_order_of_telling_pieces(text: str) -> None:
    check(diagnose(text))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes(data: bytes) -> None:
    check(diagnose_lines(lines_of(io.BytesIO(data))))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=2000), st.sampled_from(NAMES))
def test_any_text_around_a_failure(text: str, name: str) -> None:
    check(diagnose(f"{text}\n{raised(sample(name))}{text}"))


def test_reading_bytes_and_text_is_the_same() -> None:
    for name in NAMES:
        log = SHAPES["on_rank_1"](sample(name))
        assert diagnose_lines(lines_of(io.BytesIO(log.encode()))) == diagnose(log)


def test_bytes_that_are_not_utf8_and_colours_do_not_hide_the_failure() -> None:
    text = f"\x1b[1;31m{sample('vllm_no_cache_blocks')}\x1b[0m".encode()
    log = b"\xff\xfe caf\xe9 \x80\n" + FRAMES.encode() + text + b"\n\xc3("
    diagnosis = diagnose_lines(lines_of(io.BytesIO(log)))
    assert diagnosis.cause == "kv_cache"
    assert "\x1b" not in diagnosis.evidence


def test_evidence_never_writes_to_a_terminal() -> None:
    diagnosis = diagnose(FRAMES + "ValueError: \x1b]0;title\x07\x1b[2J\x08\x07 no\u009b2J space\n")
    assert diagnosis.evidence.isprintable() and diagnosis.evidence.startswith("ValueError: no")


def test_what_a_progress_bar_stands_before_is_found() -> None:
    bar = "  1%|1         | 5/500 [00:10<16:30,  2.00s/it]\r"
    diagnosis = diagnose(bar * 50 + raised(sample("cuda_out_of_memory.container")) + bar)
    assert diagnosis.is_memory


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    data = b"x" * (3 * 2**20) + b" exits with return code = -9\n" + b"short\n"
    first, second, third = lines_of(io.BytesIO(data))
    assert len(first) <= LONGEST_LINE and first.endswith("return code = -9")
    assert (second, third) == ("short", "")
    assert diagnose_lines(lines_of(io.BytesIO(data))).cause == "host_ram"


class Endless(io.RawIOBase):
    """Blocks that are made as they are read, so that only the reader's memory counts."""

    def __init__(
        self,
        block: bytes,
        total: int,
        last: bytes,
    ) -> None:
        self._left, self._block, self._last = total, block, last

    def read(self, size: int = -1, /) -> bytes:
        if self._left > 0:
            self._left -= len(self._block)
            return self._block
        last, self._last = self._last, b""
        return last


def peak_of(stream: Endless) -> tuple[Diagnosis, int]:
    tracemalloc.start()
    try:
        return diagnose_lines(lines_of(stream)), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log() -> None:
    last = raised(sample("disk")).encode()
    steps = (
        b"{'loss': 0.0123, 'grad_norm': 0.5, 'reward': 0.25}\n  1%|1         | 5/500"
        b" [00:10<16:30]\r" * 1500
    )
    errors = (
        FRAMES + "ZeroDivisionError: no\n{'loss': 0.1}\n{'loss': 0.1}\n{'loss': 0.1}\n"
    ).encode() * 500
    sources = "".join(
        f"[rank{number}]: {line}\n" for number in range(3000) for line in FRAMES.splitlines()
    ).encode()
    for block, times in ((steps, 6), (errors, 6), (sources, 2)):
        diagnosis, peak = peak_of(Endless(block, times * len(block), last))
        assert diagnosis.cause == "disk_or_permission"
        assert peak < 24 * 2**20, peak


@pytest.fixture
def guard() -> Iterator[None]:
    """Limit of CPU seconds, used up by code that does not end; wall time would depend on the
    machine's load.
    """
    earlier = signal.signal(
        signal.SIGPROF, lambda *_: pytest.fail("a pattern that is nearly matched takes for ever")
    )
    signal.setitimer(signal.ITIMER_PROF, 90)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, earlier)


def test_words_that_are_nearly_a_failure_end_soon(guard: None) -> None:
    # Patterns with gaps in them could take time in the square or the cube of a line's length:
    # minutes, not a moment.
    nearly = [
        "Tried to allocate 1 GiB. GPU 0 has a total capacity of 1 GiB of which 1 GiB is free. "
        + "Process 1 has 1.0 MiB memory in use. " * 800,
        "LimitForeseen " * 2000,
        "Available memory on node " * 1200,
        "a." * 16000 + "Error memory",
        "(" * 30000 + " memory error",
        "[rank1]: " * 3000 + "memory error",
        "1: " * 10000 + "error",
        "\x1b[" * 15000 + "error memory",
    ]

    def lines() -> Iterator[str]:
        for line in nearly:
            yield "Traceback (most recent call last):"
            yield line[:LONGEST_LINE]
            yield f"RuntimeError: {line[: LONGEST_LINE - 20]}"
            yield "end error"

    assert not diagnose_lines(lines()).is_memory
