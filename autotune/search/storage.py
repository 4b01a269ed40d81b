"""Opening of a study's storage, which waits while the database is away, and of the study of a job.

Optuna's heartbeat and retries cover failed trials, not lost connections: a call that hits a
restarting server or another process's lock raises there and ends the search.
tests/search/test_postgres.py and tests/faults need these retries.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
)

from autotune.core.answer import plain
from autotune.core.errors import BadInput, MissingExtra, StorageLost, StudyMismatch
from autotune.core.files import sqlite_file
from autotune.core.job import Job
from autotune.core.secrets import without_password
from autotune.machine.local_files import refuse_network_storage
from autotune.machine.signals import stop_requested, uninterrupted
from autotune.search.claims import Claims, delete_claims
from autotune.search.trial_storage import (
    DRIVER,
    AtomicMemoryStorage,
    AtomicRDBStorage,
    TrialEnd,
    TrialWriter,
)

Result = TypeVar("Result")

_QUESTION = "autotune:question"
MAX_TRIES = 5  # Lookups of something that another driver is creating
IN_MEMORY = "memory://"  # Storage in memory, for simulations

MAX_WAIT_SECONDS = 300.0
MAX_LAST_WAIT_SECONDS = 1.0  # Wait after an interruption by the user, for each of the last calls
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0
NOTIFY_AFTER_SECONDS = 3.0

_PERMANENT = (
    "readonly",
    "read-only",
    "permission denied",
    "no such table",
    "does not exist",
    "disk is full",
    "no space left",
    "quota exceeded",
)
"""Parts of error messages that waiting does not change."""

_OF_A_FULL_DISK = (
    "disk i/o error",
    "unable to open database file",
)  # SQLite's messages also for a disk that is full
MIN_FREE_BYTES = 64 * 1024
MAX_MISSING_SECONDS = 5.0  # Wait for a file that was moved away and may come back
_DELETED = "deleted"

_RETRIED = (
    "create_new_study",
    "delete_study",
    "get_all_studies",
    "get_study_directions",
    "get_study_id_from_name",
    "get_study_name_from_id",
    "get_study_system_attrs",
    "get_study_user_attrs",
    "get_trial",
    "set_study_system_attr",
    "set_study_user_attr",
    "set_trial_state_values",
    "set_trial_system_attr",
    "set_trial_user_attr",
    "get_trial_id_from_study_id_trial_number",
    "_create_new_trial",
    "_get_trials",
    "_set_trial_param",
    "_get_best_trial_id",
    "enter",
    "end",
)
"""Storage methods to retry. Each may run twice: a trial whose creation was not confirmed is
swept like a killed driver's.
"""


def open_storage(
    url: str, retry: RetryPolicy | None = None
) -> AtomicRDBStorage | AtomicMemoryStorage:
    """Return the storage of an Optuna URL, with retries while the database is away. BadInput if
    it cannot be opened.
    """
    if url == IN_MEMORY:
        return AtomicMemoryStorage()
    refuse_network_storage(url)
    try:
        opened = _opened(url)
    except ImportError as missing:
        raise MissingExtra(f"The storage {without_password(url)}", "postgres") from missing
    except Exception as error:  # sqlalchemy raises many types, with the reason in the first line
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        way_out = "Give --storage a database that can be written, like sqlite:///path/to/study.db."
        if "password" in reason:
            way_out = (
                "Name a password file in PGPASSFILE, set PGPASSWORD, or give a file with the whole"
                " URL by --storage-file."
            )
        what = f"The storage {without_password(url)} can't be opened: {without_password(reason)}."
        raise BadInput(what, way_out=way_out) from error
    return _with_retries(_with_write_ahead_log(opened), retry or RetryPolicy(url=url))


def _opened(url: str) -> AtomicRDBStorage:
    """Open the database; if several drivers create its tables at once, all but one get an error
    first.
    """
    for _ in range(MAX_TRIES):
        with contextlib.suppress(IntegrityError, ProgrammingError):
            return AtomicRDBStorage(_with_driver(url), engine_kwargs=_options(url))
        time.sleep(random.uniform(0.1, 0.5))
    return AtomicRDBStorage(_with_driver(url), engine_kwargs=_options(url))


def _with_driver(url: str) -> str:
    """Select psycopg 3 for `postgresql://`, which SQLAlchemy maps to psycopg2."""
    scheme, separator, rest = url.partition("://")
    chosen = f"postgresql+psycopg{separator}{rest}" if scheme in ("postgresql", "postgres") else url
    return chosen.replace("{", "{{").replace("}", "}}")  # Optuna formats the URL


def _options(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    # Replace a broken connection on next use, and detect a vanished server.
    alive = {
        "connect_timeout": 10,
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
    }
    return {"pool_pre_ping": True, "connect_args": alive if url.startswith("postgres") else {}}


def _with_write_ahead_log(storage: AtomicRDBStorage) -> AtomicRDBStorage:
    """Switch SQLite to its write-ahead log, if the file system supports it: without it each
    write waits for the disk. Committed trials survive the end of this process in either mode.
    """
    if storage.engine.dialect.name == "sqlite":

        def on_connect(connection: Any, record: object) -> None:
            with contextlib.suppress(Exception):  # the driver need not be sqlite3
                # Longer waits are handled by RetryPolicy, which reports them.
                connection.execute("PRAGMA busy_timeout=1000")
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")

        event.listen(storage.engine, "connect", on_connect)
        storage.engine.dispose()
    return storage


@dataclass(kw_only=True)
class RetryPolicy:
    """Waits for the database up to a time limit, and reports the wait."""

    url: str
    seconds: float = MAX_WAIT_SECONDS
    notify: Callable[[str], None] = field(default=lambda text: None)
    _inode: tuple[int, int] | None = field(
        default=None, init=False
    )  # Device and inode of SQLite's file, as first seen

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
                patience = (
                    min(self.seconds, MAX_LAST_WAIT_SECONDS) if stop_requested() else self.seconds
                )
                if not _is_temporary(error, reason) or waited > patience:
                    lost = f"The study's database {where} can't be used any more ({reason})."
                    raise StorageLost(f"{lost} {_fix(reason)}") from error
                if waited > NOTIFY_AFTER_SECONDS and not notified:
                    self.notify(f"The database {where} does not answer ({reason}); waiting for it.")
                    notified = True
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _is_deleted(self) -> bool:
        """Return True if SQLite's file is gone or another one: open connections would write on,
        into a file without a name.
        """
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


def _with_retries(storage: AtomicRDBStorage, retry: RetryPolicy) -> AtomicRDBStorage:
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
        return (
            "Its trials are lost with it; the record of this user's measurements is not, and a new"
            " search uses it."
        )
    kept = "Its trials are kept: go on with --resume"
    full = any(
        words in reason.lower() for words in ("disk is full", "no space left", "quota exceeded")
    )
    return f"{kept}, after freeing some space." if full else f"{kept}."


def _is_temporary(error: BaseException, reason: str) -> bool:
    """Return True for another process's lock, a restarting server or a lost network."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    # PendingRollbackError: Optuna continued a transaction of a lost connection; the next call
    # begins a new one.
    away = isinstance(cause, (OperationalError, InterfaceError, PendingRollbackError)) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
    return away and not any(words in reason.lower() for words in _PERMANENT)


def open_optuna(job: Job, storage: BaseStorage) -> optuna.Study:
    """Return the job's study: a new one, or the one to resume."""
    name = job.study_name
    existing = {study.study_name for study in storage.get_all_studies()}
    if name in existing and job.fresh:
        _delete_claims_unless_active(storage, name)
        optuna.delete_study(study_name=name, storage=storage)
        existing.discard(name)
    study = optuna.create_study(
        study_name=name, storage=storage, direction="maximize", load_if_exists=True
    )
    if name in existing:
        _check_same(study, job)
    else:
        study.set_user_attr(_QUESTION, plain(job.identity))
        set_metric_names(study, ["completion tokens per second"])
    return study


def set_metric_names(study: optuna.Study, names: Sequence[str]) -> None:
    """Name the study's figures, without the warning that Optuna may change this call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(names))


def _check_same(study: optuna.Study, job: Job) -> None:
    requested, recorded = plain(job.identity), _question_of(study)
    if recorded != requested:
        how = "it was not made by autotune"
        if isinstance(recorded, dict):
            how = "it differs in " + ", ".join(
                sorted(name for name in requested if recorded.get(name) != requested[name])
            )
        raise StudyMismatch(
            f"The study {job.study_name!r} was made for another request ({how}).",
            way_out=(
                "Give this one a name of its own with --study NAME, or start over with --fresh."
            ),
        )
    if not job.resume and any(
        trial.state.is_finished() for trial in study.get_trials(deepcopy=False)
    ):
        raise BadInput(
            f"The study {job.study_name!r} already holds measurements of this request.",
            way_out="Go on with --resume, or start over with --fresh.",
        )


def _question_of(study: optuna.Study) -> Any:
    """Return the recorded job; a driver that just created the study may not have written it yet."""
    for _ in range(MAX_TRIES):
        if _QUESTION in study.user_attrs or study.get_trials(deepcopy=False):
            break
        time.sleep(0.5)
    return study.user_attrs.get(_QUESTION)


def _delete_claims_unless_active(storage: BaseStorage, name: str) -> None:
    """Refuse --fresh while another driver works on the study."""
    if not isinstance(storage, RDBStorage):
        return
    claims = Claims(storage.engine, name)
    busy = [driver.words for driver in claims.active_drivers]
    claims.leave()
    if busy:
        raise BadInput(
            f"The study {name!r} is in use by {busy[0]}, so it can't be deleted.",
            way_out=(
                "Join it with --resume, give this one a name of its own with --study NAME, or end"
                " the other first."
            ),
        )
    delete_claims(storage.engine, name)


def sweep_stale(trials: TrialWriter, claims: Claims | None, mine: Collection[int] = ()) -> None:
    """Fail the trials that a terminated driver left running, except `mine`: their candidates are
    open again.
    """
    running = trials.study.get_trials(
        deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)
    )
    others = [] if claims is None else claims.active_drivers
    active = {
        driver.driver for driver in others
    }  # read second: the driver of every such trial was there before
    for trial in running:
        owner = trial.user_attrs.get(
            DRIVER
        )  # a trial without one was begun a moment ago, if any other driver is active
        owned = bool(active) if owner is None else owner in active
        if trial.number not in mine and not owned:
            trials.end(
                trial, TrialEnd(state=TrialState.FAIL)
            )  # without effect on one that has ended meanwhile


def the_study_in(storage: BaseStorage, name: str | None, url: str) -> str:
    """Return the name of the named study, or of the only one."""
    there, where = [study.study_name for study in storage.get_all_studies()], without_password(url)
    listed = ", ".join(there) or "no study at all"
    if name is None and len(there) == 1:
        return there[0]
    if name is None:
        raise BadInput(
            f"{where} holds {len(there)} studies.", way_out=f"Name one with --study: {listed}."
        )
    if name not in there:
        raise BadInput(f"{where} holds no study {name!r}.", way_out=f"It holds: {listed}.")
    return name
