"""The table in a short form: every fault at every place, once. `make test-faults` plays it at
length.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from tests.faults.play import Stages, play, stages
from tests.faults.table import FAULTS, PLACES, ExecutorKind, Fault, why_not_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 100
"""None of those that the long form plays first."""

ROWS = [(fault, place) for place in PLACES for fault in FAULTS if place in fault.places]

RAY_IN_EVERY_RUN = (
    "probe killed",
    "driver killed",
    "node's actor killed",
    "node lost",
)
"""Rows that differ on Ray. The others take as long and have the same path as the local ones:
`make test-long`. A lost head is that of `cli/test_lost_head.py`.
"""


ONLY_LONG = ("floods its output",)
"""Rows whose mechanism another slow test has: `executors/test_local.py` reads 256 MiB."""


def row(fault: Fault, place: ExecutorKind) -> ParameterSet:
    is_like_local = place == "ray" and fault.name not in RAY_IN_EVERY_RUN
    is_long = is_like_local or fault.name in ONLY_LONG
    return pytest.param(
        fault, place, id=f"{fault.name}, {place}", marks=[pytest.mark.long] if is_long else []
    )


def test_the_rows_of_every_run_exist() -> None:
    assert {*RAY_IN_EVERY_RUN, *ONLY_LONG} <= {fault.name for fault in FAULTS}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    playable = [(fault, place) for fault, place in ROWS if why_not_here(fault, place) is None]
    faults, places = tuple(fault for fault, _ in playable), tuple({place for _, place in playable})
    with stages(tmp_path_factory.mktemp("faults"), faults, places) as shared_stages:
        yield shared_stages


@pytest.mark.parametrize(("fault", "place"), [row(fault, place) for fault, place in ROWS])
def test_no_measurement_is_lost_and_no_process_stays(
    fault: Fault,
    place: ExecutorKind,
    shared: Stages,
) -> None:
    reason = why_not_here(fault, place)
    if reason is not None:
        pytest.skip(reason)
    outcome = play(fault, place, SEED, shared)
    assert outcome.wrong == () and outcome.lost == 0 and outcome.orphans == 0
