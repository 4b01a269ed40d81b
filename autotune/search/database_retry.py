"""Retries of database calls while the database is away.

Optuna's heartbeat and retries cover failed trials, not lost connections: a call that hits a
restarting server or another process's lock raises there and ends the search.
tests/search/test_postgres.py and tests/faults need these retries.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from autotune.core.errors import StorageLost
from autotune.core.files import sqlite_file
from autotune.core.secrets import without_password
from autotune.machine.signals import stop_requested, uninterrupted

Result = TypeVar("Result")
Storage = TypeVar("Storage", bound=RDBStorage)

MAX_WAIT_SECONDS = 300.0
MAX_LAST_WAIT_SECONDS = 1.0  # Wait after an interruption by the user, for each of the last calls
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0
NOTIFY_AFTER_SECONDS = 3.0

_PERMANENT = (
    "readonly", "read-only", "permission denied", "no such table", "does not exist", "disk is full", "no space left",
    "quota exceeded",
)  # fmt: skip
"""Parts of error messages that waiting does not change."""

_OF_A_FULL_DISK = ("disk i/o error", "unable to open database file")  # SQLite's messages also for a disk that is full
MIN_FREE_BYTES = 64 * 1024
MAX_MISSING_SECONDS = 5.0  # Wait for a file that was moved away and may come back
_DELETED = "deleted"

_RETRIED = (
    "create_new_study", "delete_study", "get_all_studies", "get_study_directions", "get_study_id_from_name",
    "get_study_name_from_id", "get_study_system_attrs", "get_study_user_attrs", "get_trial", "set_study_system_attr",
    "set_study_user_attr", "set_trial_state_values", "set_trial_system_attr", "set_trial_user_attr",
    "get_trial_id_from_study_id_trial_number", "_create_new_trial", "_get_trials", "_set_trial_param", "_get_best_trial_id",
    "enter", "end",
)  # fmt: skip
"""Storage methods to retry. Each may run twice: a trial whose creation was not confirmed is swept like a killed driver's."""


@dataclass(kw_only=True)
class RetryPolicy:
    """Waits for the database up to a time limit, and reports the wait."""

    url: str
    seconds: float = MAX_WAIT_SECONDS
    notify: Callable[[str], None] = field(default=lambda text: None)
    _inode: tuple[int, int] | None = field(default=None, init=False)  # Device and inode of SQLite's file, as first seen

    def __call__(self, call: Callable[[], Result]) -> Result:
        """Return the call's result; StorageLost if the database does not come back."""
        began, pause, notified = time.monotonic(), FIRST_PAUSE_SECONDS, False
        where = without_password(self.url)
        while True:
            if self._is_deleted():
                if time.monotonic() - began > MAX_MISSING_SECONDS:
                    raise StorageLost(f"The study's database {where} was deleted. {_fix(_DELETED)}")
                time.sleep(pause)
                continue
            try:
                with uninterrupted():
                    return call()
            except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
                reason, waited = _reason(error), time.monotonic() - began
                reason = self._with_disk_state(reason)
                patience = min(self.seconds, MAX_LAST_WAIT_SECONDS) if stop_requested() else self.seconds
                if not _is_temporary(error, reason) or waited > patience:
                    lost = f"The study's database {where} can't be used any more ({reason})."
                    raise StorageLost(f"{lost} {_fix(reason)}") from error
                if waited > NOTIFY_AFTER_SECONDS and not notified:
                    self.notify(f"The database {where} does not answer ({reason}); waiting for it.")
                    notified = True
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _is_deleted(self) -> bool:
        """Return True if SQLite's file is gone or another one: open connections would write on, into a file without a name."""
        file = sqlite_file(self.url)
        if file is None:
            return False
        try:
            found = file.stat()
        except OSError:
            return self._inode is not None
        self._inode = self._inode or (found.st_dev, found.st_ino)
        return self._inode != (found.st_dev, found.st_ino)

    def _with_disk_state(self, reason: str) -> str:
        """Name a full disk behind a general message of SQLite."""
        file = sqlite_file(self.url)
        with contextlib.suppress(OSError):
            if file is not None and reason.lower().startswith(_OF_A_FULL_DISK):
                full = shutil.disk_usage(file.parent).free < MIN_FREE_BYTES
                return f"{reason}: the disk is full" if full else reason
        return reason


def with_retries(storage: Storage, retry: RetryPolicy) -> Storage:
    """Return the same storage, with methods that wait for the database."""

    def retrying(method: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(method)(lambda *args, **kwargs: retry(lambda: method(*args, **kwargs)))

    for name in _RETRIED:
        setattr(storage, name, retrying(getattr(storage, name)))
    return storage


def _reason(error: BaseException) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _fix(reason: str) -> str:
    if _DELETED in reason:
        return "Its trials are lost with it; the record of this user's measurements is not, and a new search uses it."
    kept = "Its trials are kept: go on with --resume"
    full = any(words in reason.lower() for words in ("disk is full", "no space left", "quota exceeded"))
    return f"{kept}, after freeing some space." if full else f"{kept}."


def _is_temporary(error: BaseException, reason: str) -> bool:
    """Return True for another process's lock, a restarting server or a lost network."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    # PendingRollbackError: Optuna continued a transaction of a lost connection; the next call begins a new one.
    away = isinstance(cause, (OperationalError, InterfaceError, PendingRollbackError)) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
    return away and not any(words in reason.lower() for words in _PERMANENT)
