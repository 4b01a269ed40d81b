"""Expected time of a search's probes, and the budget that follows where nobody stated one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.events import Event, Note
from autotune.core.prediction import EngineFit, Estimate, PhasePrediction, Prediction
from autotune.search import pipeline
from autotune.search.loop import SHORT_PROBE, Clock
from autotune.search.probe_cost import LONG_PROBES, SHORT_PROBES, probe_cost
from tests.simulated import toy_job, toy_space

NOTHING = Estimate.exactly(0)
ENGINE = EngineFit(
    kv_cache_bytes=NOTHING,
    kv_cache_tokens=1,
    concurrency=1,
    longest_length=1,
)


def predicted(
    cycle: float,
    *,
    fits: bool | None = True,
    engine: bool = False,
) -> Prediction:
    rollout = PhasePrediction(
        name="rollout",
        peak_bytes=NOTHING,
        seconds=Estimate(
            value=cycle,
            low=cycle / 2,
            high=2 * cycle,
        ),
    )
    return Prediction(
        candidate_id=str(cycle),
        basis="traced",
        fits=fits,
        limit_bytes=1,
        peak_memory_bytes=NOTHING,
        torch_peak_allocated_bytes=NOTHING,
        torch_peak_reserved_bytes=NOTHING,
        phases=(rollout,),
        engine=ENGINE if engine else None,
    )


def test_a_probe_costs_its_starts_and_its_cycles() -> None:
    without, with_engine = (probe_cost([predicted(10, engine=engine)]) for engine in (False, True))
    assert without is not None
    assert with_engine is not None
    assert without.short.value == pytest.approx(25 + 4 * 10)
    assert without.long.value == pytest.approx(25 + 6 * 10)
    assert with_engine.short.value == pytest.approx(without.short.value + 35)
    assert without.short.low < without.short.value < without.short.high


def test_only_the_first_probe_of_a_load_pays_for_loading() -> None:
    """Loading 25 + 35 s, a short probe 4 · 3 s, a confirmation 6 · 3 s: of 280 s, two loads and
    three confirmations leave 280 - 120 - 54 = 106 s, which are 8 short probes.
    """
    cost = probe_cost([predicted(3, engine=True)])
    assert cost is not None
    text = cost.text(280)
    assert "72 s (" in text and "12 s where model and engine are loaded" in text
    assert "pays for 2 loads, 8 short probes and 3 confirmations" in text


def test_the_median_candidate_that_may_fit_counts() -> None:
    cost = probe_cost([predicted(1), predicted(10), predicted(20), predicted(9000, fits=False)])
    assert cost is not None
    assert cost.short.value == pytest.approx(25 + 40)


def test_a_probe_ends_at_its_deadline_and_an_unknown_speed_has_no_cost() -> None:
    slow = probe_cost([predicted(1000)])
    assert slow is not None
    assert slow.short.value == SHORT_PROBE.deadline_seconds
    unknown = predicted(1)
    unknown = replace(
        unknown, phases=tuple(replace(phase, seconds=None) for phase in unknown.phases)
    )
    assert probe_cost([unknown]) is None


@pytest.mark.parametrize("adapts", [True, False])
def test_expensive_probes_extend_a_budget_that_nobody_stated(adapts: bool, tmp_path: Path) -> None:
    events: list[Event] = []
    job = replace(toy_job(tmp_path, toy_space(), 1), budget_seconds=60.0, budget_adapts=adapts)
    clock = Clock(60.0)
    pipeline._show_cost(job, [predicted(100)], events.append, clock)
    assert clock.budget_seconds == (SHORT_PROBES * 425 + LONG_PROBES * 600 if adapts else 60.0)
    assert isinstance(events[0], Note)
    assert "A probe is predicted to take" in events[0].text
