"""Retries of database calls while the database is away.

Optuna's heartbeat and retries cover failed trials, not lost connections: a call that hits a
restarting server or another process's lock raises there and ends the search.
tests/search/test_postgres.py and tests/faults need these retries.

A call is repeated while its error is temporary, up to a time limit. A read-only, full or deleted
database is reported at once: waiting does not change it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
)

from autotune.core.errors import StorageLost, StudyMismatch
from autotune.core.files import sqlite_file
from autotune.core.secrets import without_password
from autotune.machine.signals import stop_requested, uninterrupted

Result = TypeVar("Result")

MAX_WAIT_SECONDS = 300.0
MAX_LAST_WAIT_SECONDS = 1.0  # Wait after an interruption by the user, for each of the last calls
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
NOTIFY_AFTER_SECONDS = 3.0
MAX_MISSING_SECONDS = 5.0  # Wait for a file that was moved away and may come back
MIN_FREE_BYTES = 64 * 1024
MAX_CREATIONS = 20  # Tries to create tables: each may meet another of some fifteen tables
MIN_CREATION_PAUSE_SECONDS = 0.05
MAX_CREATION_PAUSE_SECONDS = 0.5

DELETED = "deleted"
ANOTHER_VERSION = "Start a study of this version with --fresh, or give it a name with --study NAME."
ANOTHER_DATABASE = "Name another database with --storage, or another folder with --out."
FOREIGN_TABLE_MESSAGES = ("no such column", "has no column", "undefinedcolumn")
"""Parts of messages about tables whose columns are not those of a study."""
FULL_DISK_MESSAGES = ("disk is full", "no space left", "quota exceeded")
PERMANENT_MESSAGES = (
    "readonly",
    "read-only",
    "permission denied",
    "no such table",
    "does not exist",
    *FOREIGN_TABLE_MESSAGES,
    *FULL_DISK_MESSAGES,
)
"""Parts of error messages that waiting does not change."""
# Of tables, types and rows that another process made after this one looked for them, or is making
CREATED_MEANWHILE_MESSAGES = (
    "already exists",
    "unique constraint",
    "duplicate key",
    "database is locked",
)
# SQLite's messages also for a disk that is full
POSSIBLY_FULL_DISK_MESSAGES = ("disk i/o error", "unable to open database file")


@dataclass(kw_only=True)
class RetryPolicy:
    """Waits for the database up to a time limit, and reports the wait."""

    url: str
    seconds: float = MAX_WAIT_SECONDS
    notify: Callable[[str], None] = field(default=lambda text: None)
    # Device and inode of SQLite's file, as first seen
    _inode: tuple[int, int] | None = field(default=None, init=False)

    def __call__(self, call: Callable[[], Result]) -> Result:
        """Return the call's result; StorageLost if the database does not come back."""
        began = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        notified = False
        while True:
            if self._is_deleted():
                self._wait_for_file(time.monotonic() - began, pause)
                continue
            try:
                with uninterrupted():
                    return call()
            except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
                waited = time.monotonic() - began
                reason = self._temporary_reason(error, waited)
                if waited > NOTIFY_AFTER_SECONDS and not notified:
                    self.notify(
                        f"The database {self._shown} does not answer ({reason}); waiting for it."
                    )
                    notified = True
            except JSONDecodeError as error:
                raise StudyMismatch(
                    f"The study's database {self._shown} holds a value that autotune did not"
                    " write.",
                    way_out=ANOTHER_VERSION,
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    @property
    def _shown(self) -> str:
        return without_password(self.url)

    def _wait_for_file(self, waited: float, pause: float) -> None:
        """Wait until SQLite's file is there again; StorageLost if that takes too long."""
        if waited > MAX_MISSING_SECONDS:
            lost = f"The study's database {self._shown} was {DELETED}."
            raise StorageLost(f"{lost} {_way_out(DELETED)}")
        time.sleep(pause)

    def _temporary_reason(self, error: Exception, waited: float) -> str:
        """Return why the call failed if another attempt may succeed; else raise what ends it."""
        reason = self._reason(error)
        if any(message in reason.lower() for message in FOREIGN_TABLE_MESSAGES):
            raise StudyMismatch(
                f"The database {self._shown} has tables of another program ({reason}).",
                way_out=ANOTHER_DATABASE,
            ) from error
        if not _is_temporary(error, reason) or waited > self._patience:
            lost = f"The study's database {self._shown} can't be used any more ({reason})."
            raise StorageLost(f"{lost} {_way_out(reason)}") from error
        return reason

    @property
    def _patience(self) -> float:
        if stop_requested():
            return min(self.seconds, MAX_LAST_WAIT_SECONDS)
        return self.seconds

    def _is_deleted(self) -> bool:
        """Return True if SQLite's file is gone or another one: open connections would write on,
        into a file without a name.
        """
        file = sqlite_file(self.url)
        if file is None:
            return False
        try:
            stat = file.stat()
        except OSError:
            return self._inode is not None
        inode = (stat.st_dev, stat.st_ino)
        self._inode = self._inode or inode
        return self._inode != inode

    def _reason(self, error: BaseException) -> str:
        """Return the first line of the error, with a full disk behind a general message of
        SQLite.
        """
        cause = error.__cause__ or error
        lines = str(cause).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        file = sqlite_file(self.url)
        may_be_full = reason.lower().startswith(POSSIBLY_FULL_DISK_MESSAGES)
        if file is not None and may_be_full:
            with contextlib.suppress(OSError):
                free_bytes = shutil.disk_usage(file.parent).free
                if free_bytes < MIN_FREE_BYTES:
                    return f"{reason}: the disk is full"
        return reason


def _way_out(reason: str) -> str:
    if DELETED in reason:
        return (
            "Its trials are lost with it; the record of this user's measurements is not, and a new"
            " search uses it."
        )
    if _has_any(FULL_DISK_MESSAGES, reason):
        return "Its trials are kept: go on with --resume, after freeing some space."
    return "Its trials are kept: go on with --resume."


def _has_any(messages: tuple[str, ...], reason: str) -> bool:
    return any(message in reason.lower() for message in messages)


def _is_temporary(error: BaseException, reason: str) -> bool:
    """Return True for another process's lock, a restarting server or a lost network."""
    if _has_any(PERMANENT_MESSAGES, reason):
        return False
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    # PendingRollbackError: Optuna continued a transaction of a lost connection; the next call
    # begins a new one.
    if isinstance(cause, (OperationalError, InterfaceError, PendingRollbackError)):
        return True
    return isinstance(cause, DBAPIError) and cause.connection_invalidated


def with_shared_tables(create: Callable[[], Result]) -> Result:
    """Return what `create` returns, which makes tables that are not there yet.

    Each looks for a table before it makes it. Of several drivers that start together on a new
    database, all but one find a table made between the two, and look again.
    """
    for _ in range(MAX_CREATIONS - 1):
        try:
            return create()
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if not _has_any(CREATED_MEANWHILE_MESSAGES, str(error)):
                raise
        pause = random.uniform(MIN_CREATION_PAUSE_SECONDS, MAX_CREATION_PAUSE_SECONDS)
        time.sleep(pause)
    return create()
