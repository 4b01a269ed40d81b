"""Drivers that start at the same moment on a database without tables."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import optuna

from autotune.search.claims import Claims
from autotune.search.storage import open_storage

DRIVERS = 16
TIMEOUT_SECONDS = 120


def _start(url: str, barrier: Barrier) -> None:
    barrier.wait(TIMEOUT_SECONDS)
    storage = open_storage(url)
    optuna.create_study(
        study_name="shared",
        storage=storage,
        load_if_exists=True,
    )
    Claims(storage.engine, "shared").leave()  # type: ignore[union-attr]


# Before the creation of tables was repeated, half of the drivers ended with "table trials already
# exists": sixteen of them show it in one run.
def test_drivers_that_start_together_all_open_a_new_study(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(DRIVERS)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    drivers = []
    for _ in range(DRIVERS):
        driver = context.Process(target=_start, args=(url, barrier))
        driver.start()
        drivers.append(driver)

    for driver in drivers:
        driver.join(TIMEOUT_SECONDS)
    assert [driver.exitcode for driver in drivers] == [0] * DRIVERS
