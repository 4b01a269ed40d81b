"""A database that is away for a while: what was asked of it is asked again, until it answers or patience ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError

from autotune.errors import StorageLost
from autotune.secrets import without_password

Given = ParamSpec("Given")
Found = TypeVar("Found")
Storage = TypeVar("Storage", bound=RDBStorage)

SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
TOLD_AFTER_SECONDS = 3.0
"""A database that is back before this was hardly away."""

_HOPELESS = ("readonly", "read-only", "permission denied", "no such table", "does not exist")
"""Words of an answer that waiting does not change."""

_ASKED = (
    "create_new_study", "delete_study", "get_all_studies", "get_study_directions", "get_study_id_from_name",
    "get_study_name_from_id", "get_study_system_attrs", "get_study_user_attrs", "get_trial", "set_study_system_attr",
    "set_study_user_attr", "set_trial_state_values", "set_trial_system_attr", "set_trial_user_attr",
    "get_trial_id_from_study_id_trial_number", "_create_new_trial", "_get_trials", "_set_trial_param", "_get_best_trial_id",
    "enter", "end",
)  # fmt: skip
"""What Optuna asks of a database. Each may be asked twice: a trial that was made and not heard of is swept like a dead one."""


@dataclass(kw_only=True)
class Patience:
    """How long a database is waited for, and who is told that it is."""

    url: str
    seconds: float = SECONDS
    say: Callable[[str], None] = field(default=lambda text: None)

    def __call__(self, call: Callable[[], Found]) -> Found:
        began, pause, told = time.monotonic(), FIRST_PAUSE, False
        while True:
            try:
                return call()
            except (StorageInternalError, DBAPIError, PendingRollbackError) as error:
                reason, waited = _reason(error), time.monotonic() - began
                if not _passes(error, reason) or waited > self.seconds:
                    raise StorageLost(self._lost(reason)) from error
                if waited > TOLD_AFTER_SECONDS and not told:
                    self.say(f"The database {without_password(self.url)} does not answer ({reason}); waiting for it.")
                    told = True
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _lost(self, reason: str) -> str:
        where = without_password(self.url)
        return f"The study's database {where} can't be used any more ({reason}). What it holds is kept: go on with --resume."


def patient(storage: Storage, patience: Patience) -> Storage:
    """The same storage, whose calls wait for the database."""
    for name in _ASKED:
        setattr(storage, name, _waiting(getattr(storage, name), patience))
    return storage


def _waiting(method: Callable[Given, Any], patience: Patience) -> Callable[Given, Any]:
    @wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        return patience(lambda: method(*args, **kwargs))

    return call


def _reason(error: BaseException) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _passes(error: BaseException, reason: str) -> bool:
    """Whether it may be otherwise the next time: somebody else's lock, a server that starts again, a network that is away."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    # Optuna goes on in a transaction whose connection went away; the next call begins a new one.
    away = isinstance(cause, (OperationalError, InterfaceError, PendingRollbackError)) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
    return away and not any(words in reason.lower() for words in _HOPELESS)
