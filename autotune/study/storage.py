"""Where a study is kept, and whose it is."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Collection
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, ProgrammingError

from autotune.errors import BadInput, MissingExtra, StudyMismatch
from autotune.question import Question
from autotune.secrets import without_password
from autotune.study.claims import Claims, NoOthers, SharedClaims, forget_claims
from autotune.study.file_systems import refuse_network
from autotune.study.patience import Patience, patient
from autotune.study.records import DRIVER, plain
from autotune.study.whole import End, Trials, WholeMemory, WholeRDB

_QUESTION = "autotune:question"


TRIES = 5
"""So often what another driver is just making is looked for again."""

IN_MEMORY = "memory://"
"""A study that is kept nowhere: for simulations."""


def open_storage(url: str, patience: Patience | None = None) -> WholeRDB | WholeMemory:
    """The storage behind an Optuna URL, which waits for a database that is away; whatever else stands in the way is said."""
    if url == IN_MEMORY:
        return WholeMemory()
    refuse_network(url)
    try:
        opened = _opened(url)
    except ImportError as missing:
        raise MissingExtra(f"The storage {without_password(url)}", "postgres") from missing
    except Exception as error:  # sqlalchemy has many, and says the telling part in the first line
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadInput(
            f"The storage {without_password(url)} can't be opened: {without_password(reason)}.",
            way_out="Give --storage a database that can be written, like sqlite:///path/to/study.db.",
        ) from error
    return patient(_quick(opened), patience or Patience(url=url))


def _opened(url: str) -> WholeRDB:
    """Of several drivers that make a new database's tables at the same moment, all but one are told that they exist."""
    for _ in range(TRIES):
        with contextlib.suppress(IntegrityError, ProgrammingError):
            return WholeRDB(_with_driver(url), engine_kwargs=_options(url))
        time.sleep(random.uniform(0.1, 0.5))
    return WholeRDB(_with_driver(url), engine_kwargs=_options(url))


def _with_driver(url: str) -> str:
    """`postgresql://` as people write it; SQLAlchemy would take that for a driver that nobody installs any more."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql+psycopg{separator}{rest}" if scheme in ("postgresql", "postgres") else url


def _options(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    # A connection that broke is replaced when it is next used, and a server that vanished is noticed.
    alive = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    return {"pool_pre_ping": True, "connect_args": alive if url.startswith("postgres") else {}}


def _quick(storage: WholeRDB) -> WholeRDB:
    """SQLite with a log written ahead: the writes of each probe would else wait for the disk several times.

    What was told is in the file whichever way this process ends. Where the file system has no such log, nothing changes.
    """
    if storage.engine.dialect.name == "sqlite":

        def on_connect(connection: Any, record: object) -> None:
            with contextlib.suppress(Exception):  # the driver's own errors, of a module that need not be sqlite3
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                # Whoever waits longer for somebody's lock shall know it, and SQLite itself would wait in silence.
                connection.execute("PRAGMA busy_timeout=1000")

        event.listen(storage.engine, "connect", on_connect)
        storage.engine.dispose()
    return storage


def open_optuna(question: Question, storage: BaseStorage) -> optuna.Study:
    """The study of this question: a new one, or the one that is being resumed."""
    name = question.study_name
    existing = {study.study_name for study in storage.get_all_studies()}
    if name in existing and question.fresh:
        _refuse_to_throw_away(storage, name)
        optuna.delete_study(study_name=name, storage=storage)
        existing.discard(name)
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    if name in existing:
        _check_same(study, question)
    else:
        study.set_user_attr(_QUESTION, plain(question.identity))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(["completion tokens per second"])
    return study


def _check_same(study: optuna.Study, question: Question) -> None:
    asked, recorded = plain(question.identity), _question_of(study)
    if recorded != asked:
        raise StudyMismatch(
            f"The study {question.study_name!r} holds another question ({_difference(recorded, asked)}).",
            way_out="Give this one a name of its own with --study NAME, or start over with --fresh.",
        )
    if not question.resume and any(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)):
        raise BadInput(
            f"The study {question.study_name!r} already holds measurements of this very question.",
            way_out="Go on with --resume, or start over with --fresh.",
        )


def _question_of(study: optuna.Study) -> Any:
    """Another driver that made the study a moment ago may not have said yet what it is about."""
    for _ in range(TRIES):
        if _QUESTION in study.user_attrs or study.get_trials(deepcopy=False):
            break
        time.sleep(0.5)
    return study.user_attrs.get(_QUESTION)


def _difference(recorded: Any, asked: dict[str, Any]) -> str:
    if not isinstance(recorded, dict):
        return "it was not made by autotune"
    names = sorted(name for name in asked if recorded.get(name) != asked[name])
    return "it differs in " + ", ".join(names)


def claims_on(storage: BaseStorage, name: str, patience: Patience) -> Claims:
    """What this driver holds of the study; it joins now, and those that are gone are buried."""
    if not isinstance(storage, RDBStorage):
        return NoOthers()
    claims = SharedClaims(storage.engine, name, patiently=patience)
    claims.bury()
    return claims


def _refuse_to_throw_away(storage: BaseStorage, name: str) -> None:
    """--fresh ends nobody else's work."""
    if not isinstance(storage, RDBStorage):
        return
    looking = SharedClaims(storage.engine, name)
    busy = [driver.words for driver in looking.living]
    looking.leave()
    if busy:
        raise BadInput(
            f"The study {name!r} is being worked on by {busy[0]}, so it can't be thrown away.",
            way_out="Join it with --resume, give this one a name of its own with --study NAME, or end the other first.",
        )
    forget_claims(storage.engine, name)


def sweep_stale(trials: Trials, claims: Claims, mine: Collection[int] = ()) -> int:
    """Fail the trials that a killed driver left running; their candidates are open again. Those of living others stay, and
    `mine`, this driver's own."""
    left = trials.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    living = {driver.name for driver in claims.living}  # asked second: whoever began one of these was there before
    stale = [trial for trial in left if trial.number not in mine and not _is_anybodys(trial, living)]
    for trial in stale:
        trials.end(trial, End(state=TrialState.FAIL))  # which leaves one as it is that has ended meanwhile
    return len(stale)


def _is_anybodys(trial: FrozenTrial, living: Collection[str]) -> bool:
    """One that does not say yet whose it is was begun a moment ago, where anybody else is at work."""
    whose = trial.user_attrs.get(DRIVER)
    return bool(living) if whose is None else whose in living


def the_study_in(storage: BaseStorage, wanted: str | None, url: str) -> str:
    """The name of the one that is meant: the named one, or the only one."""
    there, where = [study.study_name for study in storage.get_all_studies()], without_password(url)
    if wanted is None and len(there) == 1:
        return there[0]
    if wanted is None:
        raise BadInput(f"{where} holds {len(there)} studies.", way_out=f"Name one with --study: {_listed(there)}.")
    if wanted not in there:
        raise BadInput(f"{where} holds no study {wanted!r}.", way_out=f"It holds: {_listed(there)}.")
    return wanted


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no study at all"
