"""What earlier studies of this user measured, and what they answered: one folder, plain JSON.

It is `$XDG_DATA_HOME/autotune` (`~/.local/share/autotune`) and may be deleted at any time:

    measurements/KEY.jsonl   one line for each probe; KEY is a hash of all that must be the same for a figure to hold here:
                             model, method, versions of the packages, device, its driver and its memory, the limit
    answers/KEY.json         a finished study's answer; KEY is a hash of that and of the whole question
    proofs/KEY.json          one configuration, proven to fit or not to; lengths/KEY.json  the longest prompt of a dataset

A line is written at once and a file is replaced as a whole, so whatever is killed leaves nothing half done.
What can't be read (cut short, edited, of another schema) is passed over and counted, never guessed at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from autotune.candidate import fingerprint
from autotune.files import FOR_ITS_OWNER, put_whole
from autotune.recommendation import Recommendation, Trial

SCHEMA = 1
LARGEST_LINE_BYTES = 256 * 1024
MOST_READ_BYTES = 16 * 1024 * 1024
"""Of one file; of a longer one the end is read, which is the newest."""

ANSWERS = "answers"
LARGEST_ANSWER_BYTES = 64 * 1024 * 1024

_Kind = TypeVar("_Kind")


def default_folder() -> Path:
    """Where the store lies unless told otherwise."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "autotune"


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """All that must be the same for a measurement of then to hold now."""

    facts: Mapping[str, object]
    """Model, method, versions, device, driver, limit."""

    question: Mapping[str, object]
    """What else was asked: knobs and their choices, dataset, seed."""

    @property
    def key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts})

    @property
    def question_key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts, "question": self.question})


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured candidate."""

    schema: int
    when: str
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a finished study answered."""

    schema: int
    when: str
    where: str
    """The machine's own name."""

    facts: Mapping[str, object]
    budget_seconds: float
    max_probes: int
    answer: Recommendation

    def serves(self, *, budget_seconds: float, max_probes: int) -> bool:
        """Whether another search with these means would find no more: it was done, or had at least as much to spend."""
        if self.answer.proven in ("no better candidate possible", "stopped improving"):
            return True
        return budget_seconds <= self.budget_seconds and max_probes <= self.max_probes


@dataclass(frozen=True, kw_only=True)
class Found:
    """Trials of earlier studies, oldest first."""

    trials: tuple[Trial, ...]
    unreadable: int = 0
    """Lines that were passed over."""


class Store:
    """A folder. One that can't be read or written holds nothing and stops nobody."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def remember(self, here: Circumstances, trials: Iterable[Trial], *, when: str) -> None:
        """Append what was measured; each line in one write, so that several studies may do so at once."""
        lines = [msgspec.json.encode(_plain(Line(schema=SCHEMA, when=when, trial=trial))) + b"\n" for trial in trials]
        with contextlib.suppress(OSError):
            path = self._measurements(here)
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                for line in lines:
                    if len(line) <= LARGEST_LINE_BYTES:
                        os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def measured(self, here: Circumstances) -> Found:
        """Everything measured under the same circumstances."""
        trials, unreadable = [], 0
        for line in _last_lines(self._measurements(here)):
            known = _read(line, Line) if len(line) <= LARGEST_LINE_BYTES else None
            if known is None or known.schema != SCHEMA:
                unreadable += 1
            else:
                trials.append(known.trial)
        return Found(trials=tuple(trials), unreadable=unreadable)

    def conclude(self, here: Circumstances, answered: Answered) -> None:
        """Keep a finished study's answer, in place of an earlier one to the same question."""
        self.keep(ANSWERS, here.question_key, answered)

    def answer(self, here: Circumstances) -> Answered | None:
        """The answer to this very question under these very circumstances, if there was one."""
        known = self.kept(ANSWERS, here.question_key, Answered)
        return known if known is not None and known.schema == SCHEMA else None

    def keep(self, room: str, key: str, value: object) -> None:
        """Keep one value under its key, in place of an earlier one."""
        with contextlib.suppress(OSError):
            path = self.folder / room / f"{key}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            put_whole(path, msgspec.json.encode(_plain(value)), mode=FOR_ITS_OWNER)

    def kept(self, room: str, key: str, kind: type[_Kind]) -> _Kind | None:
        """What is kept there; None where there is nothing that can be read as that."""
        return self._read_file(self.folder / room / f"{key}.json", kind)

    def newest(self, room: str, kind: type[_Kind], most: int) -> tuple[_Kind, ...]:
        """What was kept last in a room, newest first."""
        try:
            files = sorted((self.folder / room).glob("*.json"), key=lambda file: -file.stat().st_mtime)[:most]
        except OSError:
            return ()
        return tuple(found for file in files if (found := self._read_file(file, kind)) is not None)

    @staticmethod
    def _read_file(path: Path, kind: type[_Kind]) -> _Kind | None:
        try:
            return _read(path.read_bytes(), kind) if path.stat().st_size <= LARGEST_ANSWER_BYTES else None
        except OSError:
            return None

    def _measurements(self, here: Circumstances) -> Path:
        return self.folder / "measurements" / f"{here.key}.jsonl"


def _plain(value: object) -> object:
    return msgspec.to_builtins(
        value, str_keys=True, enc_hook=lambda one: dict(one) if isinstance(one, MappingProxyType) else str(one)
    )


def _read(text: bytes, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _last_lines(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MOST_READ_BYTES)
            file.seek(start)
            lines = file.read(MOST_READ_BYTES).split(b"\n")
    except OSError:
        return ()
    whole = lines[1:] if start else lines  # the first may begin in its middle
    return [line for line in whole if line.strip()]
