"""Predictions of `autotune predict` for every candidate of the simulated cases and the baseline,
stored so that no traces are needed.

python benchmarks/search_predictions.py            # creates all; CASE ... creates those
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from search_cases import CASES, Case, Posed, pose

from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.core.units import MIB
from autotune.prediction.service import open_prediction_service

FOLDER = Path(__file__).resolve().parent / "results" / "search"
FIGURES = (
    "peak MiB",
    "lowest",
    "highest",
    "allocated MiB",
    "tokens/s",
    "lowest",
    "highest",
    "failure",
)
TIMED: tuple[Phase, ...] = ("rollout", "sync", "score", "forward", "backward", "optimizer")
"""Phases whose seconds are kept, each as value, lowest and highest."""

STRETCHES: dict[str, tuple[Phase, ...]] = {
    "loading": ("load",),
    "rollout": ("rollout", "sync"),
    "training": ("score", "forward", "backward", "optimizer"),
}
"""Phases of which only the highest peak is kept, as value, lowest and highest."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE")
    names = parser.parse_args().cases
    for case in CASES:
        if not names or case.name in names:
            write(case)


def file_of(case: Case) -> Path:
    return FOLDER / f"predictions_{case.name}.json"


def write(case: Case) -> None:
    """Traces the case's steps and writes one line per candidate."""
    posed = pose(case)
    with contextlib.closing(open_prediction_service(posed.job, posed.trainer)) as foresight:
        predictions = foresight.screen(_foreseen(posed))
    failures = sorted(
        {prediction.failure for prediction in predictions.values() if prediction.failure}
    )
    head = {
        "about": (
            f"autotune predict, every candidate of {case.model} ({case.tuning}) on {case.gpus}"
        ),
        "date": datetime.date.today().isoformat(),
        "versions": dict(next(iter(predictions.values())).versions),
        "limit_bytes": posed.job.memory_limit_bytes,
        "knobs": moving(posed),
        "figures": _all_titles(),
        "failures": failures,
    }
    rows = []
    for candidate in _foreseen(posed):
        rows.append([*_key(posed, candidate.knobs), *_figures(predictions[candidate.id], failures)])
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    file_of(case).write_text(
        json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"
    )
    print(
        case.name,
        len(rows),
        sum(prediction.fits is False for prediction in predictions.values()),
        file=sys.stderr,
        flush=True,
    )


def read(case: Case, posed: Posed) -> dict[str, Prediction]:
    """Return the predictions by candidate id, as the search receives them."""
    stored = json.loads(file_of(case).read_text())
    same = (
        stored["knobs"] == moving(posed) and stored["limit_bytes"] == posed.job.memory_limit_bytes
    )
    if not same or stored["figures"] != _all_titles():
        raise SystemExit(
            f"{file_of(case)} is of another space, or holds other figures."
            f" Remake it with python benchmarks/search_predictions.py {case.name}"
        )
    width = len(stored["knobs"])
    figures = {tuple(row[:width]): row[width:] for row in stored["rows"]}
    predictions = {}
    for candidate in _foreseen(posed):
        predictions[candidate.id] = _prediction(
            candidate.id,
            figures[tuple(_key(posed, candidate.knobs))],
            stored["limit_bytes"],
            stored["failures"],
        )
    return predictions


def _foreseen(posed: Posed) -> list[Candidate]:
    """Return the predicted candidates, like the product: including the baseline, which need not
    be in the space.
    """
    return list(dict.fromkeys([*posed.candidates, *([posed.baseline] if posed.baseline else [])]))


def moving(posed: Posed) -> list[str]:
    return [knob.name for knob in posed.job.space.knobs if len(knob.choices) > 1]


def _key(posed: Posed, knobs: Any) -> list[Any]:
    return [knobs.get(name) for name in moving(posed)]


def _figures(prediction: Prediction, failures: list[str]) -> list[Any]:
    peak, rate = prediction.peak_memory_bytes, prediction.tokens_per_second
    sizes = []
    for value in (peak.value, peak.low, peak.high, prediction.torch_peak_allocated_bytes.value):
        sizes.append(round(value / MIB))
    failure = None if prediction.failure is None else failures.index(prediction.failure)
    return [*sizes, *_rounded(rate), failure, *_seconds(prediction), *_peaks(prediction)]


def _titles(names: Iterable[str], unit: str) -> list[str]:
    titles = []
    for name in names:
        for end in ("", " low", " high"):
            titles.append(f"{name} {unit}{end}")
    return titles


def _all_titles() -> list[str]:
    return [*FIGURES, *_titles(TIMED, "s"), *_titles(STRETCHES, "MiB")]


def _rounded(estimate: Estimate | None) -> list[float | None]:
    if estimate is None:
        return [None] * 3
    return [float(f"{value:.4g}") for value in (estimate.value, estimate.low, estimate.high)]


def _seconds(prediction: Prediction) -> list[float | None]:
    seconds_by_phase = {phase.name: phase.seconds for phase in prediction.phases}
    seconds = []
    for name in TIMED:
        seconds.extend(_rounded(seconds_by_phase.get(name)))
    return seconds


def _peaks(prediction: Prediction) -> list[int | None]:
    """A stretch of which the candidate has no phase is None."""
    figures: list[int | None] = []
    for names in STRETCHES.values():
        peaks = [phase.peak_bytes for phase in prediction.phases if phase.name in names]
        highest = max(peaks, key=lambda peak: peak.value, default=None)
        if highest is None:
            figures += [None] * 3
        else:
            figures += [round(end / MIB) for end in (highest.value, highest.low, highest.high)]
    return figures


def _prediction(
    name: str,
    figures: list[Any],
    limit_bytes: int,
    failures: list[str],
) -> Prediction:
    value, low, high, allocated, rate, slowest, fastest, failure, *phase_figures = figures
    peak = _estimate(value * MIB, low * MIB, high * MIB)
    fits: bool | None = None
    if failure is not None or peak.low > limit_bytes:
        fits = False
    elif peak.high <= limit_bytes:
        fits = True
    return Prediction(
        candidate_id=name,
        basis="traced",
        fits=fits,
        failure=None if failure is None else failures[failure],
        limit_bytes=limit_bytes,
        peak_memory_bytes=peak,
        torch_peak_allocated_bytes=Estimate.exactly(allocated * MIB),
        torch_peak_reserved_bytes=peak,
        tokens_per_second=None if rate is None else _estimate(rate, slowest, fastest),
        phases=_phases(phase_figures),
    )


def _phases(figures: list[Any]) -> tuple[PhasePrediction, ...]:
    triples = [figures[place : place + 3] for place in range(0, len(figures), 3)]
    seconds = dict(zip(TIMED, triples, strict=False))
    peaks = dict(zip(STRETCHES, triples[len(TIMED) :], strict=True))
    predictions = []
    for stretch, phases in STRETCHES.items():
        if peaks[stretch][0] is None:
            continue
        peak = _estimate(*(size * MIB for size in peaks[stretch]))
        for phase in phases:
            timed = seconds.get(phase, [None])[0] is not None
            predictions.append(
                PhasePrediction(
                    name=phase,
                    peak_bytes=peak,
                    seconds=_estimate(*seconds[phase]) if timed else None,
                )
            )
    return tuple(predictions)


def _estimate(
    value: float,
    low: float,
    high: float,
) -> Estimate:
    """Rounding may have put the three out of order."""
    return Estimate(
        value=value,
        low=min(low, value),
        high=max(high, value),
    )


if __name__ == "__main__":
    main()
