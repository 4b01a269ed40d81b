"""Imports of the process from which drivers are forked, each used once: opening a study the
first time takes seconds.
"""

from __future__ import annotations

import tempfile

import optuna
from optuna.storages import RDBStorage

import tests.faults.driver  # noqa: F401
from autotune.search.storage import open_storage

optuna.logging.set_verbosity(optuna.logging.WARNING)
with tempfile.TemporaryDirectory() as folder:
    storage = open_storage(f"sqlite:///{folder}/study.db")
    assert isinstance(storage, RDBStorage)
    study = optuna.create_study(storage=storage)
    study.tell(study.ask(), 1.0)
    storage.engine.dispose()  # no connection goes along into a fork
