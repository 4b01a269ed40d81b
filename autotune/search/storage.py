"""Opening of a study's storage, and of the study of a job in it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event

from autotune.core.errors import BadInput, MissingExtra, StudyMismatch
from autotune.core.job import Job
from autotune.core.plain_data import plain
from autotune.core.secrets import without_password
from autotune.machine.local_files import refuse_network_storage
from autotune.search.claims import Claims, delete_claims
from autotune.search.database_retry import ANOTHER_VERSION, RetryPolicy, with_shared_tables
from autotune.search.parameters import Parameters
from autotune.search.trial_storage import DRIVER, TrialEnd, measured_end, read_trial, write_end

_QUESTION = "autotune:question"
MAX_COMMIT_TRIES = 5  # Lookups of something that another driver is creating
IN_MEMORY = "memory://"  # Storage in memory, for simulations
METRIC_NAME = "completion tokens per second"
QUESTION_PAUSE_SECONDS = 0.5


# Longer waits are handled by RetryPolicy, which reports them.
SQLITE_PRAGMAS = ("busy_timeout=1000", "journal_mode=WAL", "synchronous=NORMAL")
SQLITE_OPTIONS = {"connect_args": {"timeout": 60}}
# Detect a vanished server.
POSTGRES_CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}

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
    "set_trial_intermediate_value",
)
"""Storage methods to retry. Each may run twice: a trial whose creation was not confirmed is
swept like a killed driver's.
"""


# 1. Storage.


def open_storage(url: str, retry: RetryPolicy | None = None) -> RDBStorage | InMemoryStorage:
    """Return the storage of an Optuna URL, with retries while the database is away. BadInput if
    it cannot be opened.
    """
    if url == IN_MEMORY:
        return InMemoryStorage()
    refuse_network_storage(url)
    try:
        storage = _opened(url)
    except ImportError as missing:
        raise MissingExtra(f"The storage {without_password(url)}", "postgres") from missing
    except Exception as error:  # sqlalchemy raises many types, with the reason in the first line
        raise _cannot_open(url, error) from error
    _use_write_ahead_log(storage)
    policy = retry or RetryPolicy(url=url)
    _retry_calls(storage, policy)
    return storage


def _opened(url: str) -> RDBStorage:
    def connect() -> RDBStorage:
        return RDBStorage(_with_driver(url), engine_kwargs=_options(url))

    return with_shared_tables(connect)


def _cannot_open(url: str, error: Exception) -> BadInput:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    reason = lines[0]
    way_out = "Give --storage a database that can be written, like sqlite:///path/to/study.db."
    if "password" in reason:
        way_out = (
            "Name a password file in PGPASSFILE, set PGPASSWORD, or give a file with the whole"
            " URL by --storage-file."
        )
    return BadInput(
        f"The storage {without_password(url)} can't be opened: {without_password(reason)}.",
        way_out=way_out,
    )


def _with_driver(url: str) -> str:
    """Select psycopg 3 for `postgresql://`, which SQLAlchemy maps to psycopg2."""
    scheme, separator, address = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        url = f"postgresql+psycopg{separator}{address}"
    return url.replace("{", "{{").replace("}", "}}")  # Optuna formats the URL


def _options(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return dict(SQLITE_OPTIONS)
    # Replace a broken connection on next use.
    connection = POSTGRES_CONNECTION if url.startswith("postgres") else {}
    return {"pool_pre_ping": True, "connect_args": dict(connection)}


def _use_write_ahead_log(storage: RDBStorage) -> None:
    """Switch SQLite to its write-ahead log, if the file system supports it: without it each
    write waits for the disk. Committed trials survive the end of this process in either mode.
    """
    if storage.engine.dialect.name != "sqlite":
        return

    def on_connect(connection: Any, record: object) -> None:
        with contextlib.suppress(Exception):  # the driver need not be sqlite3
            for pragma in SQLITE_PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")

    event.listen(storage.engine, "connect", on_connect)
    storage.engine.dispose()


def _retry_calls(storage: RDBStorage, retry: RetryPolicy) -> None:
    """Let the storage's methods wait for the database."""

    def retrying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return retry(lambda: method(*args, **kwargs))

        return wraps(method)(call)

    for name in _RETRIED:
        method = getattr(storage, name)
        setattr(storage, name, retrying(method))


# 2. Study of a job.


def open_optuna(job: Job, storage: BaseStorage) -> optuna.Study:
    """Return the job's study: a new one, or the one to resume."""
    name = job.study_name
    names = [study.study_name for study in storage.get_all_studies()]
    exists = name in names
    if exists and job.fresh:
        _delete_claims_unless_active(storage, name)
        optuna.delete_study(study_name=name, storage=storage)
        exists = False
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction="maximize",
        load_if_exists=True,
    )
    if exists:
        _check_same(study, job)
    else:
        question = plain(job.identity)
        study.set_user_attr(_QUESTION, question)
        set_metric_names(study, [METRIC_NAME])
    return study


def set_metric_names(study: optuna.Study, names: Sequence[str]) -> None:
    """Name the study's figures, without the warning that Optuna may change this call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(names))


def _check_same(study: optuna.Study, job: Job) -> None:
    requested = plain(job.identity)
    recorded = _question_of(study)
    if recorded != requested:
        raise StudyMismatch(
            f"The study {job.study_name!r} was made for another request"
            f" ({_difference(recorded, requested)}).",
            way_out=(
                "Give this one a name of its own with --study NAME, or start over with --fresh."
            ),
        )
    trials = study.get_trials(deepcopy=False)
    has_results = any(trial.state.is_finished() for trial in trials)
    if has_results and not job.resume:
        raise BadInput(
            f"The study {job.study_name!r} already holds measurements of this request.",
            way_out="Go on with --resume, or start over with --fresh.",
        )


def _difference(recorded: Any, requested: dict[str, Any]) -> str:
    if not isinstance(recorded, dict):
        return "it was not made by autotune"
    names = []
    for name, value in requested.items():
        if recorded.get(name) != value:
            names.append(name)
    return "it differs in " + ", ".join(sorted(names))


def _question_of(study: optuna.Study) -> Any:
    """Return the recorded job; a driver that just created the study may not have written it yet."""
    for _ in range(MAX_COMMIT_TRIES):
        if _QUESTION in study.user_attrs or study.get_trials(deepcopy=False):
            break
        time.sleep(QUESTION_PAUSE_SECONDS)
    return study.user_attrs.get(_QUESTION)


def _delete_claims_unless_active(storage: BaseStorage, name: str) -> None:
    """Refuse --fresh while another driver works on the study."""
    if not isinstance(storage, RDBStorage):
        return
    claims = Claims(storage.engine, name)
    drivers = [driver.words for driver in claims.active_drivers]
    claims.leave()
    if drivers:
        raise BadInput(
            f"The study {name!r} is in use by {drivers[0]}, so it can't be deleted.",
            way_out=(
                "Join it with --resume, give this one a name of its own with --study NAME, or end"
                " the other first."
            ),
        )
    delete_claims(storage.engine, name)


def check_parameters(study: optuna.Study, parameters: Parameters) -> None:
    """Refuse a study whose parameters differ, which Optuna would refuse at the first trial."""
    for trial in study.get_trials(deepcopy=False):
        for name, distribution in trial.distributions.items():
            if parameters.distributions.get(name) != distribution:
                raise StudyMismatch(
                    f"The parameter {name} of the study {study.study_name!r} has other values than"
                    " this search.",
                    way_out=ANOTHER_VERSION,
                )


def sweep_stale(
    study: optuna.Study,
    claims: Claims | None,
    open_trials: Collection[int] = (),
) -> None:
    """End the trials that a terminated driver left running, except `open_trials`. One with its
    measurement counts; the candidates of the others are open again.
    """
    states = (TrialState.RUNNING, TrialState.WAITING)
    running = study.get_trials(deepcopy=False, states=states)
    active: set[str] = set()
    if claims is not None:
        # Read second: the driver of every such trial was there before.
        active = {driver.driver for driver in claims.active_drivers}
    for trial in running:
        if trial.number in open_trials:
            continue
        owner = trial.user_attrs.get(DRIVER)
        # A trial without one was begun a moment ago, if any other driver is active.
        is_owned = bool(active)
        if owner is not None:
            is_owned = owner in active
        if not is_owned:
            _end_stale(study, trial)


def _end_stale(study: optuna.Study, stale: FrozenTrial) -> None:
    end = TrialEnd(state=TrialState.FAIL)
    measured = read_trial(stale)
    if measured is not None:
        end = measured_end(measured)
    with contextlib.suppress(UpdateFinishedTrialError, ValueError):  # It has ended meanwhile
        with warnings.catch_warnings(action="ignore"):  # Optuna's, for what is written already
            write_end(optuna.Trial(study, stale._trial_id), end)
        study.tell(stale.number, end.value, state=end.state)


def the_study_in(
    storage: BaseStorage,
    name: str | None,
    url: str,
) -> str:
    """Return the name of the named study, or of the only one."""
    names = [study.study_name for study in storage.get_all_studies()]
    listed = ", ".join(names) or "no study at all"
    database = without_password(url)
    if name is None and len(names) == 1:
        return names[0]
    if name is None:
        raise BadInput(
            f"{database} holds {len(names)} studies.", way_out=f"Name one with --study: {listed}."
        )
    if name not in names:
        raise BadInput(f"{database} holds no study {name!r}.", way_out=f"It holds: {listed}.")
    return name
