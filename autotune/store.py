"""What earlier studies of this user measured, and what they answered: one folder, plain JSON.

It is `$XDG_DATA_HOME/autotune` (`~/.local/share/autotune`) and may be deleted at any time:

    measurements/KEY.jsonl   one line for each probe; KEY is a hash of all that must be the same for a figure to hold here:
                             model, method, versions of the packages, device, its driver and its memory, the limit
    answers/KEY.json         a finished study's answer; KEY is a hash of that and of the whole question

A line is written at once and a file is replaced as a whole, so whatever is killed leaves nothing half done.
What can't be read (cut short, edited, of another schema) is passed over and counted, never guessed at.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from autotune.candidate import fingerprint
from autotune.recommendation import Recommendation, Trial

SCHEMA = 1
LARGEST_LINE_BYTES = 256 * 1024
MOST_READ_BYTES = 16 * 1024 * 1024
"""Of one file; of a longer one the end is read, which is the newest."""

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
        with contextlib.suppress(OSError):
            path = self._answer(here)
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, msgspec.json.encode(_plain(answered)))

    def answer(self, here: Circumstances) -> Answered | None:
        """The answer to this very question under these very circumstances, if there was one."""
        path = self._answer(here)
        try:
            if path.stat().st_size > LARGEST_ANSWER_BYTES:
                return None
            known = _read(path.read_bytes(), Answered)
        except OSError:
            return None
        return known if known is not None and known.schema == SCHEMA else None

    def _measurements(self, here: Circumstances) -> Path:
        return self.folder / "measurements" / f"{here.key}.jsonl"

    def _answer(self, here: Circumstances) -> Path:
        return self.folder / "answers" / f"{here.question_key}.json"


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


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, whoever else writes the same."""
    descriptor, draft = tempfile.mkstemp(prefix=".draft-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
