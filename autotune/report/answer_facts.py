"""Facts of a measured answer: its advantage, its caveats, and why nothing is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.answer import PredictedCandidate, Recommendation, Trial, without_result
from autotune.core.measurement import PHASES, Measurement, Outcome, Speed
from autotune.core.space import setting_text


def relative_spread(speed: Speed | None, answer: Recommendation) -> float | None:
    """Return the relative half width of a speed's 95 % interval, the spread between runs included;
    without it (answers of earlier versions) that of the cycles."""
    if speed is None or _is_predicted(answer):
        return None
    if answer.run_spread is None:
        return speed.spread
    return answer.run_spread.half_width(speed)


def describe_advantage(answer: Recommendation) -> str | None:
    """Return one sentence about the recommendation's speed and the baseline's; None without a
    comparison.
    """
    advantage = answer.advantage
    if advantage is None or _is_predicted(answer):
        return None
    size = (
        f"{advantage.ratio:.2f} times the baseline's speed (95 % confidence: at least"
        f" {advantage.low:.2f} times)"
    )
    if advantage.why == "measurably faster":
        return f"Measurably faster: {size}."
    if advantage.why == "within the noise":
        return (
            f"No measurable difference: the fastest other candidate had {size}. The baseline is"
            " kept."
        )
    return (
        f"The baseline is kept: the fastest other candidate had {size}, but was not confirmed. Go"
        " on with --resume."
    )


def _is_predicted(answer: Recommendation) -> bool:
    """Return True if the speeds are predictions: on emulated GPUs there is no spread between
    runs.
    """
    return any(trial.measurement.emulated for trial in answer.trials)


def differing_knobs(
    winner: Trial | PredictedCandidate | None, alternative: Trial | PredictedCandidate
) -> dict[str, Any]:
    """Return the other candidate's values of the knobs in which it differs from the winner."""
    chosen: Mapping[str, object] = winner.candidate.knobs if winner else {}
    differing = {}
    for name, value in alternative.candidate.knobs.items():
        if chosen.get(name) != value:
            differing[name] = value
    return differing


def caveats_of(answer: Recommendation) -> tuple[str, ...]:
    """Return the restrictions of the winner's figures, or without a winner of all figures, and
    the candidates without any.
    """
    proof = answer.certificate or answer.winner
    trials = answer.trials if proof is None else (proof,)
    caveats: list[str] = []
    for trial in trials:
        caveats += trial.measurement.caveats
    names = []
    for candidate in without_result(answer.trials):
        names.append(_named(differing_knobs(answer.winner, candidate)))
    if names:
        listed = "; ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        caveats.append(
            f"Every probe was ended from outside, so there is no result: {listed}. --fresh measures"
            " again."
        )
    return tuple(dict.fromkeys(caveats))


def _named(knobs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={setting_text(value)}" for name, value in knobs.items())


def failed_without_memory(answer: Recommendation) -> bool:
    """Return True if no probe or confirmation lacked memory, and others failed: the answer is a
    failure, not "nothing fits".
    """
    return (
        answer.winner is None
        and bool(_results(answer))
        and not any(_lacked_memory(trial) for trial in answer.trials)
    )


def has_no_results(answer: Recommendation) -> bool:
    """Return True if every probe was ended by the budget or by an interruption."""
    return answer.winner is None and not _results(answer)


def _results(answer: Recommendation) -> list[Measurement]:
    measurements = []
    for trial in answer.trials:
        if trial.measurement.outcome is not Outcome.INTERRUPTED:
            measurements.append(trial.measurement)
    return measurements


def _lacked_memory(trial: Trial) -> bool:
    outcome = trial.measurement.outcome
    return outcome.is_out_of_memory or (outcome is Outcome.OK and not trial.verdict.fits)


def nearest_miss(answer: Recommendation) -> Trial | None:
    """Return the trial closest to fitting; None if one fits or no peak is known."""
    if answer.winner:
        return None
    missed = []
    for trial in answer.trials:
        has_peak = trial.measurement.memory.peak_bytes is not None
        if has_peak and _lacked_memory(trial) and not trial.verdict.fits:
            missed.append(trial)
    return max(missed, key=_progress, default=None)


def _progress(trial: Trial) -> tuple[int, int, int]:
    """Sort key: optimizer steps, then the phase reached, then the lower peak."""
    measured = trial.measurement
    reached = len(PHASES)
    if measured.failure is not None and measured.failure.phase is not None:
        reached = PHASES.index(measured.failure.phase)
    return measured.optimizer_steps, reached, -(measured.memory.peak_bytes or 0)
