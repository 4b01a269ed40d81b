"""Opening of a study's storage, and of the study of a job."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, ProgrammingError

from autotune.core.answer import plain
from autotune.core.errors import BadInput, MissingExtra, StudyMismatch
from autotune.core.job import Job
from autotune.core.secrets import without_password
from autotune.machine.file_systems import refuse_network_storage
from autotune.search.atomic_storage import AtomicMemoryStorage, AtomicRDBStorage, TrialEnd, TrialWriter
from autotune.search.claims import Claims, SharedClaims, delete_claims
from autotune.search.database_retry import RetryPolicy, with_retries
from autotune.search.trial_records import DRIVER

_QUESTION = "autotune:question"
MAX_TRIES = 5  # Lookups of something that another driver is creating
IN_MEMORY = "memory://"  # Storage in memory, for simulations


def open_storage(url: str, retry: RetryPolicy | None = None) -> AtomicRDBStorage | AtomicMemoryStorage:
    """Return the storage of an Optuna URL, with retries while the database is away. BadInput if it cannot be opened."""
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
            way_out = "Name a password file in PGPASSFILE, set PGPASSWORD, or give a file with the whole URL by --storage-file."
        what = f"The storage {without_password(url)} can't be opened: {without_password(reason)}."
        raise BadInput(what, way_out=way_out) from error
    return with_retries(_with_write_ahead_log(opened), retry or RetryPolicy(url=url))


def _opened(url: str) -> AtomicRDBStorage:
    """Open the database; if several drivers create its tables at once, all but one get an error first."""
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
    alive = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    return {"pool_pre_ping": True, "connect_args": alive if url.startswith("postgres") else {}}


def _with_write_ahead_log(storage: AtomicRDBStorage) -> AtomicRDBStorage:
    """Switch SQLite to its write-ahead log, if the file system supports it: without it each write waits for the disk. Committed
    trials survive the end of this process in either mode."""
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


def open_optuna(job: Job, storage: BaseStorage) -> optuna.Study:
    """Return the job's study: a new one, or the one to resume."""
    name = job.study_name
    existing = {study.study_name for study in storage.get_all_studies()}
    if name in existing and job.fresh:
        _delete_claims_unless_active(storage, name)
        optuna.delete_study(study_name=name, storage=storage)
        existing.discard(name)
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
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
            how = "it differs in " + ", ".join(sorted(name for name in requested if recorded.get(name) != requested[name]))
        raise StudyMismatch(
            f"The study {job.study_name!r} was made for another request ({how}).",
            way_out="Give this one a name of its own with --study NAME, or start over with --fresh.",
        )
    if not job.resume and any(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)):
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
    claims = SharedClaims(storage.engine, name)
    busy = [driver.words for driver in claims.active_drivers]
    claims.leave()
    if busy:
        raise BadInput(
            f"The study {name!r} is in use by {busy[0]}, so it can't be deleted.",
            way_out="Join it with --resume, give this one a name of its own with --study NAME, or end the other first.",
        )
    delete_claims(storage.engine, name)


def sweep_stale(trials: TrialWriter, claims: Claims, mine: Collection[int] = ()) -> None:
    """Fail the trials that a terminated driver left running, except `mine`: their candidates are open again."""
    running = trials.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    active = {driver.name for driver in claims.active_drivers}  # read second: the driver of every such trial was there before
    for trial in running:
        owner = trial.user_attrs.get(DRIVER)  # a trial without one was begun a moment ago, if any other driver is active
        owned = bool(active) if owner is None else owner in active
        if trial.number not in mine and not owned:
            trials.end(trial, TrialEnd(state=TrialState.FAIL))  # without effect on one that has ended meanwhile


def the_study_in(storage: BaseStorage, name: str | None, url: str) -> str:
    """Return the name of the named study, or of the only one."""
    there, where = [study.study_name for study in storage.get_all_studies()], without_password(url)
    listed = ", ".join(there) or "no study at all"
    if name is None and len(there) == 1:
        return there[0]
    if name is None:
        raise BadInput(f"{where} holds {len(there)} studies.", way_out=f"Name one with --study: {listed}.")
    if name not in there:
        raise BadInput(f"{where} holds no study {name!r}.", way_out=f"It holds: {listed}.")
    return name
