"""The table in a short form: every fault at every place, once. `make test-faults` plays it at length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.play import Stages, play, stages
from tests.faults.table import FAULTS, PLACES, ExecutorKind, Fault, why_not_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 100
"""None of those that the long form plays first."""

ROWS = [(fault, place) for place in PLACES for fault in FAULTS if place in fault.places]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    there = [(fault, place) for fault, place in ROWS if why_not_here(fault, place) is None]
    faults, places = tuple(fault for fault, _ in there), tuple({place for _, place in there})
    with stages(tmp_path_factory.mktemp("faults"), faults, places) as made:
        yield made


@pytest.mark.parametrize(("fault", "place"), ROWS, ids=[f"{fault.name}, {place}" for fault, place in ROWS])
def test_no_measurement_is_lost_and_no_process_stays(fault: Fault, place: ExecutorKind, shared: Stages) -> None:
    reason = why_not_here(fault, place)
    if reason is not None:
        pytest.skip(reason)
    found = play(fault, place, SEED, shared)
    assert found.wrong == () and found.lost == 0 and found.orphans == 0
