"""Store of earlier measurements and answers of this user: one folder of plain JSON.

The folder is `$XDG_DATA_HOME/autotune` (`~/.local/share/autotune`), readable by its owner alone. It
may be deleted at any time.

    measurements/KEY.jsonl   one line per probe; KEY hashes the conditions under which a figure is valid:
                             model, method, package versions, device, driver, memory, limit
    answers/KEY.json         answer of a finished study; KEY hashes these conditions and the whole job
    proofs/KEY.json          one configuration, proven to fit or not;  lengths/KEY.json  longest prompt of a dataset

A line is one write and a file is replaced atomically, so a killed process leaves no partial record.
Unreadable content (truncated, edited, of another schema) is skipped and counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from autotune.core.answer import Recommendation, Trial, plain
from autotune.core.candidate import fingerprint
from autotune.core.files import FOR_ITS_OWNER, make_private_folder, write_atomically

SCHEMA = 1
MAX_LINE_BYTES = 256 * 1024
MAX_READ_BYTES = 16 * 1024 * 1024  # Bytes read from one file; a longer one is read from its end, which is the newest part
ANSWERS = "answers"
MAX_ANSWER_BYTES = 64 * 1024 * 1024

_Kind = TypeVar("_Kind")


def default_folder() -> Path:
    """Return the default folder of the store."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "autotune"


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Conditions under which an earlier measurement is valid."""

    facts: Mapping[str, object]  # Model, method, versions, device, driver, limit
    job: Mapping[str, object]  # Rest of the job: knobs and their choices, dataset, seed

    @property
    def key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts})

    @property
    def job_key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts, "question": self.job})


@dataclass(frozen=True, kw_only=True)
class StoredLine:
    """One line of a measurements file."""

    schema: int
    when: str
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """Answer of a finished study."""

    schema: int
    when: str
    where: str  # Host name
    facts: Mapping[str, object]
    budget_seconds: float
    max_probes: int
    answer: Recommendation

    def serves(self, *, budget_seconds: float, max_probes: int) -> bool:
        """Return True if a search with this budget would find no more: it was complete, or had at least this budget."""
        if self.answer.proven in ("no better candidate possible", "stopped improving"):
            return True
        return budget_seconds <= self.budget_seconds and max_probes <= self.max_probes


@dataclass(frozen=True, kw_only=True)
class StoredTrials:
    """Trials of earlier studies, oldest first."""

    trials: tuple[Trial, ...]
    unreadable: int = 0  # Skipped lines


class Store:
    """Folder of records. An unreadable or read-only folder acts as an empty one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def append(self, here: Circumstances, trials: Iterable[Trial], *, when: str) -> None:
        """Append measured trials; each line in one write, which allows concurrent studies."""
        lines = [msgspec.json.encode(plain(StoredLine(schema=SCHEMA, when=when, trial=trial))) + b"\n" for trial in trials]
        with contextlib.suppress(OSError):
            path = self._measurements(here)
            self._make_folder(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                for line in lines:
                    if len(line) <= MAX_LINE_BYTES:
                        os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def measured(self, here: Circumstances) -> StoredTrials:
        """Return all trials measured under these conditions."""
        trials, unreadable = [], 0
        for line in _last_lines(self._measurements(here)):
            known = _read(line, StoredLine) if len(line) <= MAX_LINE_BYTES else None
            if known is None or known.schema != SCHEMA:
                unreadable += 1
            else:
                trials.append(known.trial)
        return StoredTrials(trials=tuple(trials), unreadable=unreadable)

    def answer(self, here: Circumstances) -> StoredAnswer | None:
        """Return the answer to this very job under these conditions, if there is one."""
        known = self.kept(ANSWERS, here.job_key, StoredAnswer)
        return known if known is not None and known.schema == SCHEMA else None

    def keep(self, folder: str, key: str, value: object) -> None:
        """Write one value under its key, replacing an earlier one."""
        with contextlib.suppress(OSError):
            path = self.folder / folder / f"{key}.json"
            self._make_folder(path.parent)
            write_atomically(path, msgspec.json.encode(plain(value)), mode=FOR_ITS_OWNER)

    def kept(self, folder: str, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return the stored value; None if it is absent or unreadable."""
        return self._read_file(self.folder / folder / f"{key}.json", kind)

    def newest(self, folder: str, kind: type[_Kind], most: int) -> tuple[_Kind, ...]:
        """Return the latest values of a folder, newest first."""
        try:
            files = sorted((self.folder / folder).glob("*.json"), key=lambda file: -file.stat().st_mtime)[:most]
        except OSError:
            return ()
        return tuple(found for file in files if (found := self._read_file(file, kind)) is not None)

    def _make_folder(self, folder: Path) -> None:
        for each in (self.folder, folder):
            make_private_folder(each)

    @staticmethod
    def _read_file(path: Path, kind: type[_Kind]) -> _Kind | None:
        try:
            return _read(path.read_bytes(), kind) if path.stat().st_size <= MAX_ANSWER_BYTES else None
        except OSError:
            return None

    def _measurements(self, here: Circumstances) -> Path:
        return self.folder / "measurements" / f"{here.key}.jsonl"


def _read(text: bytes, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _last_lines(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MAX_READ_BYTES)
            file.seek(start)
            lines = file.read(MAX_READ_BYTES).split(b"\n")
    except OSError:
        return ()
    whole = lines[1:] if start else lines  # the first line may be cut
    return [line for line in whole if line.strip()]
