"""What the process has imported, and used once, off which drivers are forked: a study takes seconds to open the first time."""

from __future__ import annotations

import tempfile

import optuna
from optuna.storages import RDBStorage

import tests.faults.driver  # noqa: F401
from autotune.study.storage import open_storage

optuna.logging.set_verbosity(optuna.logging.WARNING)
with tempfile.TemporaryDirectory() as folder:
    storage = open_storage(f"sqlite:///{folder}/study.db")
    assert isinstance(storage, RDBStorage)
    study = optuna.create_study(storage=storage)
    study.tell(study.ask(), 1.0)
    storage.engine.dispose()  # no connection goes along into a fork
