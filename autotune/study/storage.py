"""Where a study is kept, and whose it is."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event

from autotune.errors import BadInput, MissingExtra, StudyMismatch
from autotune.question import Question
from autotune.secrets import without_password
from autotune.study.records import plain

_QUESTION = "autotune:question"


IN_MEMORY = "memory://"
"""A study that is kept nowhere: for simulations."""


def open_storage(url: str) -> BaseStorage:
    """The storage behind an Optuna URL; whatever stands in the way is said in a sentence."""
    if url == IN_MEMORY:
        return InMemoryStorage()
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        return _quick(RDBStorage(url, engine_kwargs=options))
    except ImportError as missing:
        raise MissingExtra(f"The storage {without_password(url)}", "postgres") from missing
    except Exception as error:  # sqlalchemy has many, and says the telling part in the first line
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadInput(
            f"The storage {without_password(url)} can't be opened: {reason.replace(url, without_password(url))}.",
            way_out="Give --storage a database that can be written, like sqlite:///path/to/study.db.",
        ) from error


def _quick(storage: RDBStorage) -> RDBStorage:
    """SQLite with a log written ahead: a dozen small writes for each probe would else wait for the disk dozens of times.

    What was told is in the file whichever way this process ends. Where the file system has no such log, nothing changes.
    """
    if storage.engine.dialect.name == "sqlite":

        def on_connect(connection: Any, record: object) -> None:
            with contextlib.suppress(Exception):  # the driver's own errors, of a module that need not be sqlite3
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")

        event.listen(storage.engine, "connect", on_connect)
        storage.engine.dispose()
    return storage


def open_optuna(question: Question, storage: BaseStorage) -> optuna.Study:
    """The study of this question: a new one, or the one that is being resumed."""
    name = question.study_name
    existing = {study.study_name for study in storage.get_all_studies()}
    if name in existing and question.fresh:
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
    asked, recorded = plain(question.identity), study.user_attrs.get(_QUESTION)
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


def _difference(recorded: Any, asked: dict[str, Any]) -> str:
    if not isinstance(recorded, dict):
        return "it was not made by autotune"
    names = sorted(name for name in asked if recorded.get(name) != asked[name])
    return "it differs in " + ", ".join(names)


def sweep_stale(study: optuna.Study) -> int:
    """Fail the trials that a killed driver left running; their candidates are open again."""
    stale = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    for trial in stale:
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
    return len(stale)


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
