"""Two real ranks: all generate the varied lengths and agree on the start of the timing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.measurement import Outcome
from autotune.frameworks import trainer
from tests.worker.test_trl_ranks import GENEROUS, candidate, two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]
PLAN = replace(
    GENEROUS,
    timed_cycles=2,
    settling_cycles=2,
    varied_lengths=True,
)


def test_both_ranks_vary_and_settle_alike(tmp_path: Path) -> None:
    executor = two_ranks(trainer("trl").adapter, tmp_path)
    try:
        measurement = executor.open(candidate(1)).measure(candidate(1), PLAN)
    finally:
        executor.close()
    assert measurement.outcome is Outcome.OK, measurement.failure
    assert measurement.exercised is not None and measurement.worst is not None
    assert measurement.exercised.varied_generations == 4
    assert len(measurement.worst.cycle_seconds) == 2
    assert measurement.worst.steady is not None
    # The planned warm-up, those that were left out, and the timed ones, on both ranks.
    cycles = 1 + measurement.worst.left_out_cycles + 2
    assert measurement.optimizer_steps == measurement.exercised.optimizer_steps == cycles
    assert max(measurement.worst.rank_skew.values()) > 0
    memory = measurement.memory
    assert memory.peak_bytes is not None and memory.lowest_peak_bytes is not None
    assert 0 <= memory.spread_bytes < memory.peak_bytes
