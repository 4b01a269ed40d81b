r"""Messages of many failures in short synthetic logs; each label was decided before the log was
read.

== name | cause / another correct cause | raw
    @file:function| the statement that failed there
    Exception: its message

A file is in the installed packages unless it begins with / or with !, which is removed. `raw` is an
unchanged log. `\n` in the message is a line's end; a text without a cause in its first line has it
in its last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from autotune.diagnosis import diagnose
from autotune.failures.table import CAUSES, MEMORY_CAUSES
from tests.every import for_each

TEXTS = Path(__file__).parent / "texts"
PACKAGES = "/venv/lib/python3.11/site-packages/"
START = (Path(__file__).parent / "around/text_start.log").read_text()
HEADER = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 88, in <module>\n    main()\n'
)
MISTAKEN = {
    "verl-remax-union": (
        "a check inside a framework that no setting leads to: its words say nothing of that"
    ),
    "nccl-dup": "NCCL's remarks behind its error are not believed",
    "mem-flashinfer-ws": "a workspace of a fixed size",
    "cuda-visible": "an index without a word",
}
"""Texts that are known to be named otherwise, each with why."""


def _frame(line: str) -> str:
    place, _, statement = line[1:].partition("|")
    file, _, function = place.rpartition(":")
    file = file[1:] if file.startswith("!") else file if file.startswith("/") else PACKAGES + file
    return f'  File "{file}", line 123, in {function}\n    {statement.strip()}\n'


def _cases() -> Iterator[tuple[str, set[str], str]]:
    for file in sorted(TEXTS.glob("*.txt")):
        for block in re.split(r"(?m)^== ", file.read_text())[1:]:
            head, _, body = block.partition("\n")
            name, *fields = (part.strip() for part in head.split("|"))
            lines = body.rstrip("\n").split("\n")
            if not fields:
                fields = [lines.pop().removeprefix("| ").strip()]
                log = "\n".join(lines).removeprefix(": ").replace("\\n", "\n").replace("\\t", "\t")
            elif "raw" in fields:
                log = "\n".join(lines)
            else:
                messages = (
                    line.replace("\\n", "\n").replace("\\t", "\t") + "\n"
                    for line in lines
                    if not line.startswith("@")
                )
                log = (
                    HEADER
                    + "".join(_frame(line) for line in lines if line.startswith("@"))
                    + "".join(messages)
                )
            yield name, {cause.strip() for cause in fields[0].split("/")}, f"{START}{log}\n"


CASES = {name: (causes, log) for name, causes, log in _cases()}


def test_there_are_many_and_each_has_a_cause() -> None:
    assert len(CASES) > 490
    assert all(causes <= {*CAUSES, "null"} for causes, _ in CASES.values())


@for_each(CASES)
def test_it_is_named_for_what_it_is(name: str) -> None:
    causes, log = CASES[name]
    diagnosis = diagnose(log)
    assert ((diagnosis.cause or "null") in causes) == (name not in MISTAKEN), diagnosis
    assert not diagnosis.is_memory or causes & set(MEMORY_CAUSES)
