"""The best candidate by prediction, printed before the first probe."""

from __future__ import annotations

import io
from pathlib import Path

from autotune.core.events import BestPredicted, CandidatesPruned
from autotune.report.job_text import Progress
from autotune.search.forecast_search import best_predicted
from autotune.search.loop import baseline_candidate, legal_candidates
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

TRAINER = ToyTrainer()
LIMIT_BYTES = 600 * MIB


def test_it_is_the_fastest_that_surely_fits_at_the_preferred_settings(tmp_path: Path) -> None:
    job = toy_job(tmp_path, toy_space(), LIMIT_BYTES)
    machine = Machine(limit_bytes=LIMIT_BYTES)
    candidates = legal_candidates(job, TRAINER)
    predictions = Oracle(machine=machine, off=0.02).screen(candidates)
    baseline = baseline_candidate(job, TRAINER)
    best = best_predicted(job, candidates, baseline, predictions)
    assert best is not None and best.prediction.fits

    preferred = []
    for candidate in candidates:
        learning = (candidate.knobs["num_generations"], candidate.knobs["max_completion_length"])
        if learning == (8, 64) and 1.02 * machine.need(candidate) <= LIMIT_BYTES:
            preferred.append(machine.speed(candidate))
    assert machine.speed(best.candidate) >= 0.95 * max(preferred)


def test_nothing_is_named_where_nothing_surely_fits(tmp_path: Path) -> None:
    job = toy_job(tmp_path, toy_space(), 50 * MIB)
    candidates = legal_candidates(job, TRAINER)
    predictions = Oracle(machine=Machine(limit_bytes=50 * MIB), off=0.02).screen(candidates)
    assert best_predicted(job, candidates, None, predictions) is None
    assert best_predicted(job, candidates, None, {}) is None


def test_it_is_shown_before_the_first_probe(tmp_path: Path) -> None:
    job = toy_job(tmp_path, toy_space(), LIMIT_BYTES)
    candidates = legal_candidates(job, TRAINER)
    predictions = Oracle(machine=Machine(limit_bytes=LIMIT_BYTES), off=0.02).screen(candidates)
    best = best_predicted(job, candidates, None, predictions)
    assert best is not None
    stream = io.StringIO()
    with Progress(job.space, stream=stream) as progress:
        progress(BestPredicted(best=best))
        progress(
            CandidatesPruned(
                candidates=96,
                budget_seconds=600.0,
                max_probes=10,
                resumed_trials=0,
            )
        )
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("best by prediction: batch=")
    assert second.startswith("  predicted: fits: ") and "tokens/s" in second
    assert third.startswith("96 candidates")
