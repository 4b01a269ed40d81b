"""Memory of every candidate: what one outcome implies for others, and the peak relative to the
limit.

Implications of one outcome for other candidates:

- Out of memory: every candidate that needs at least as much memory, by the knobs' declared effects, fails too.
- Fits: every candidate that needs at most as much fits too.
- An engine without room for itself: its share may be too small or too large; the failure's table row has the direction.
- A load that failed: it fails for every candidate with the same load.

Peaks are estimated by the stretches of a cycle. An engine that is awake during the rollout and
activations kept for the backward pass have different prediction errors, so each stretch is
corrected by the peaks measured in it. A candidate fits if every stretch does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Measurement, Outcome, Phase
from autotune.core.prediction import Estimate, Prediction
from autotune.failures.table import directions_after
from autotune.search.surrogate.candidate_table import (
    BoolArray,
    CandidateTable,
    FloatArray,
    IndexArray,
)
from autotune.search.surrogate.gaussian_process import (
    INTERVAL_DEVIATIONS,
    Fit,
    Kernels,
    Observations,
    Posterior,
    Regression,
    normal_cdf,
)

ENGINE_CAUSES = frozenset(
    {"kv_cache", "engine_startup"}
)  # Causes where the rollout engine lacks room for itself
SLEEP_KNOBS = frozenset(
    {"vllm_enable_sleep_mode", "sleep_level"}
)  # Sleep mode of a running engine: no effect on its start
ENGINE_AWAKE = (
    Outcome.OOM_ROLLOUT,
    Outcome.OOM_SYNC,
)  # Out-of-memory outcomes while the engine is awake
SHARE_KNOB = (  # Knob that `free_share` among a failure's numbers refers to
    "vllm_gpu_memory_utilization"
)


@dataclass(frozen=True)
class Implications:
    """Certain outcomes by row of the table."""

    impossible: BoolArray  # A candidate that needs at most as much ran out of memory
    possible: BoolArray  # A candidate that needs at least as much fits


class Implied:
    """Implications of all outcomes so far; a call with more trials evaluates the new ones alone."""

    def __init__(self, table: CandidateTable) -> None:
        self._table, self._trials, self._found = (
            table,
            tuple[Trial, ...](),
            implications_of(table, ()),
        )

    def after(self, trials: Sequence[Trial]) -> Implications:
        known = len(self._trials)
        if len(trials) < known or any(
            one is not other for one, other in zip(self._trials, trials, strict=False)
        ):
            known, self._found = 0, implications_of(self._table, ())
        if len(trials) > known:
            new, old = implications_of(self._table, trials[known:]), self._found
            impossible = old.impossible | new.impossible
            self._found = Implications(
                impossible=impossible, possible=(old.possible | new.possible) & ~impossible
            )
        self._trials = tuple(trials)
        return self._found


def implications_of(table: CandidateTable, trials: Sequence[Trial]) -> Implications:
    """Return everything that these outcomes imply, including for the measured candidates."""
    impossible, possible = np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for trial in trials:
        index = table.index.get(trial.candidate.id)
        if index is None:
            continue
        if trial.verdict.fits:
            possible |= table.demanding_at_most(index)
        elif ran_out(trial.measurement):
            impossible |= table.demanding_at_least(index)
        if trial.measurement.outcome is Outcome.OOM_LOAD:
            impossible |= table.loads == table.loads[index]
        # An engine with sleep mode that ran out while awake: the training step's memory is free at
        # that time, so neither a smaller batch nor recomputation helps.
        sleeps = any(trial.candidate.settings.get(name) for name in SLEEP_KNOBS)
        if (
            sleeps
            and trial.measurement.outcome in ENGINE_AWAKE
            and not blames_engine(trial.measurement)
        ):
            impossible |= table.demanding_at_least_any(table.differing_in_batches(index))
        impossible |= _loads_without_engine_room(table, trial)
    return Implications(impossible=impossible, possible=possible & ~impossible)


def ran_out(measurement: Measurement) -> bool:
    """Return True if the outcome rules out every more demanding candidate."""
    if measurement.outcome is Outcome.OK:
        return (
            measurement.memory.peak_bytes is not None
            and measurement.memory.peak_bytes > measurement.memory.limit_bytes
        )
    return measurement.outcome.is_out_of_memory and not blames_engine(measurement)


def blames_engine(measurement: Measurement) -> bool:
    """Return True if a larger share may cure the engine's lack of room. Assumed if the failure's
    table row is unknown.
    """
    failure = measurement.failure
    if failure is None or failure.cause not in ENGINE_CAUSES:
        return False
    return (
        failure.row is None
        or directions_after(failure.cause, failure.row).get(SHARE_KNOB) == "raise"
    )


def _loads_without_engine_room(table: CandidateTable, trial: Trial) -> BoolArray:
    """Return the loads that differ from this failed one only in the settings to move, and not
    towards the cure.
    """
    failure = trial.measurement.failure
    found = np.zeros(len(table), dtype=bool)
    if failure is None or failure.cause not in ENGINE_CAUSES or failure.row is None:
        return found
    failed, free = trial.candidate.load, _free_share(trial, failure.numbers)
    towards = {
        name: way
        for name, way in directions_after(failure.cause, failure.row).items()
        if name in failed
    }
    if not towards:
        return found
    ignored = {*towards, *(SLEEP_KNOBS if failure.phase == "load" else ())}
    for number, other in table.load_examples.items():
        load, share = other.load, other.load.get(SHARE_KNOB)
        if any(failed.get(name) != load.get(name) for name in {*failed, *load} - ignored):
            continue
        # No setting moved in the direction that cures the failure, or a larger share is claimed
        # than the message reports as free.
        no_better = all(
            _not_beyond(failed.get(name), load.get(name), way) for name, way in towards.items()
        )
        if no_better or (free is not None and isinstance(share, float) and share > free):
            found |= table.loads == number
    return found


def _free_share(trial: Trial, numbers: Mapping[str, int | float]) -> float | None:
    """Return the share that the message reports as free, in the meaning of the knob.

    vLLM reports shares of the whole device, and the knob is one of the limit. The share that it was
    asked for has both meanings: free = knob * reported as free / reported as asked.
    """
    free, asked = numbers.get("free_share"), numbers.get("asked_share")
    knob = trial.candidate.load.get(SHARE_KNOB)
    if free is None or not asked or not isinstance(knob, int | float):
        return free
    return knob * free / asked


def _not_beyond(failed: object, other: object, way: str) -> bool:
    if failed == other:
        return True
    if not isinstance(failed, (int, float)) or not isinstance(other, (int, float)):
        return False
    return other < failed if way == "raise" else other > failed


STRETCHES: Mapping[str, tuple[Phase, ...]] = {
    "loading": ("load",),
    "rollout": ("rollout", "sync"),
    "training": ("reward", "score", "forward", "backward", "optimizer"),
}
# Single stretch, for candidates that were not predicted by phase.
WHOLE_CYCLE: Mapping[str, tuple[Phase, ...]] = {
    "cycle": tuple(phase for phases in STRETCHES.values() for phase in phases)
}

MIN_WIDTH = 0.08  # Lower bound of a prediction's standard deviation, as a share
UNPREDICTED_WIDTH = 0.7  # Standard deviation of an unpredicted need, around half of the limit
LOG_HALF = math.log(0.5)
NEED_PER_DOUBLING = (
    0.1  # Without predictions: logarithmic memory added per doubling of a memory consumer
)
NOISE = (0.004, 0.02)  # Possible standard deviations between two measurements of one candidate
OOM_FACTOR = 1.005  # Lower bound of need / limit after an out-of-memory error
MIN_BOUND_DEVIATION = 0.01  # Lower bound of the standard deviation that a bound leaves


@dataclass(frozen=True)
class _Stretch:
    phases: tuple[Phase, ...]
    prior: FloatArray
    width: FloatArray
    kernels: Kernels
    regression: Regression


class MemoryModel:
    """Predicted peaks, corrected by measured ones."""

    def __init__(
        self, table: CandidateTable, found: Sequence[Prediction | None], limit_bytes: int
    ) -> None:
        self._table, self._limit_bytes = table, limit_bytes
        self._devices = [None if one is None else one.training_devices for one in found]
        known = [one for one in found if one is not None]
        by_phase = bool(known) and all(one.phases for one in known)
        predicted = np.array([one is not None for one in found], dtype=bool)
        offset = np.where(predicted, 0.0, NEED_PER_DOUBLING * table.steps)
        self._stretches: dict[str, _Stretch] = {}
        for name, phases in (STRETCHES if by_phase else WHOLE_CYCLE).items():
            shares = [_predicted_share(one, phases, by_phase, limit_bytes) for one in found]
            prior = (
                np.array([LOG_HALF if one is None else math.log(one.value) for one in shares])
                + offset
            )
            width = np.array(
                [
                    UNPREDICTED_WIDTH if one is None else max(MIN_WIDTH, interval_width(one))
                    for one in shares
                ]
            )
            # The predictions show each knob's effect on the stretch; an unpredicted candidate gets
            # their median.
            figures = np.where(predicted, prior, np.median(prior[predicted])) if by_phase else None
            kernels = Kernels(table, figures=figures)
            self._stretches[name] = _Stretch(
                phases, prior, width, kernels, Regression(kernels, width, NOISE)
            )

    def posterior(
        self, trials: Sequence[Trial], pending: IndexArray
    ) -> tuple[Posterior, FloatArray, FloatArray]:
        """Return log(peak / limit) of the most demanding stretch; the probability that no
        stretch exceeds the limit, Π Φ(-μ/s); and the highest lower bound of the stretches, μ -
        1.64 s.
        """
        informative = [
            (index, trial.measurement)
            for trial in trials
            if not blames_engine(trial.measurement)
            and (index := self._table.index.get(trial.candidate.id)) is not None
        ]
        found = [self._corrected(name, informative, pending) for name in self._stretches]
        means = np.array([one.mean for one in found])
        deviations = np.array([one.deviation for one in found])
        highest, rows = means.argmax(axis=0), np.arange(means.shape[1])
        peak = Posterior(
            means[highest, rows],
            deviations[highest, rows],
            statistics.fmean(one.noise for one in found),
        )
        fits = np.prod(normal_cdf(-means / deviations), axis=0)
        return peak, fits, np.asarray((means - INTERVAL_DEVIATIONS * deviations).max(axis=0))

    def _corrected(
        self, name: str, informative: Sequence[tuple[int, Measurement]], pending: IndexArray
    ) -> Posterior:
        one = self._stretches[name]
        exact, bounds = [], []
        for index, measured in informative:
            if measured.outcome.is_out_of_memory:
                phase = measured.failure.phase if measured.failure else None
                known = any(phase in stretch.phases for stretch in self._stretches.values())
                if phase in one.phases if known else name == self._most_demanding(index):
                    bounds.append(
                        (
                            index,
                            math.log(minimum_need(measured) / self._limit_bytes) - one.prior[index],
                        )
                    )
            elif measured.worst is not None and (reached := self._reached(name, index, measured)):
                exact.append((index, math.log(reached / self._limit_bytes) - one.prior[index]))
        rows = np.array([index for index, _ in exact], dtype=np.int64)
        observed = Observations(
            rows, np.array([residual for _, residual in exact]), np.zeros(len(exact))
        )
        if bounds:
            observed = _with_bounds(
                observed, bounds, Fit(one.kernels, one.width, observed, NOISE).posterior
            )
        found = one.regression.posterior(observed, pending)
        return replace(
            found, mean=found.mean + one.prior, deviation=np.maximum(found.deviation, 1e-3)
        )

    def _reached(self, name: str, index: int, measured: Measurement) -> int | None:
        """Return the peak measured in the stretch. A peak without phases belongs to the most
        demanding stretch.
        """
        memory = measured.memory.on_first(self._devices[index])
        by_phase = memory.phase_peak_bytes
        here = [by_phase[phase] for phase in self._stretches[name].phases if phase in by_phase]
        if here:
            return max(here)
        return memory.peak_bytes if not by_phase and name == self._most_demanding(index) else None

    def _most_demanding(self, index: int) -> str:
        return max(self._stretches, key=lambda name: float(self._stretches[name].prior[index]))


def minimum_need(measurement: Measurement) -> float:
    """Return the least bytes that a candidate needs after it ran out: max(peak + requested,
    limit · OOM_FACTOR).
    """
    memory = measurement.memory
    requested = measurement.failure.numbers.get("asked_bytes", 0) if measurement.failure else 0
    return max((memory.peak_bytes or 0) + requested, memory.limit_bytes * OOM_FACTOR)


def interval_width(one: Estimate) -> float:
    """Return the standard deviation of an estimate's logarithm."""
    return math.log(one.high / max(one.low, one.value / 20)) / (2 * INTERVAL_DEVIATIONS)


def _predicted_share(
    one: Prediction | None, phases: tuple[Phase, ...], by_phase: bool, limit_bytes: int
) -> Estimate | None:
    """Return predicted peak / limit; a stretch without predicted phases gets a tenth of the
    peak.
    """
    if one is None or one.peak_memory_bytes.value <= 0:
        return None
    peaks = (
        [phase.peak_bytes for phase in one.phases if phase.name in phases]
        if by_phase
        else [one.peak_memory_bytes]
    )
    highest = max(peaks, key=lambda peak: peak.value, default=one.peak_memory_bytes.scaled(0.1))
    return highest.scaled(1 / limit_bytes)


def _with_bounds(
    observed: Observations, bounds: Sequence[tuple[int, float]], found: Posterior
) -> Observations:
    """Add lower bounds b as the moments of the normal distribution truncated to values above b.

    With z = (b - μ)/s and λ = φ(z)/Φ(-z):  E = μ + s λ,  Var = s² (1 + z λ - λ²).
    """
    indices = np.array([index for index, _ in bounds], dtype=np.int64)
    bound = np.array([residual for _, residual in bounds])
    mean, deviation = found.mean[indices], np.maximum(found.deviation[indices], MIN_BOUND_DEVIATION)
    z = (bound - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    above = np.maximum(normal_cdf(-z), 1e-9)
    ratio = np.where(z > 5, z, density / above)  # λ tends to z
    expected = np.maximum(mean + deviation * ratio, bound)
    variance = np.maximum(deviation**2 * (1 + z * ratio - ratio**2), MIN_BOUND_DEVIATION**2)
    return Observations(
        np.concatenate([observed.indices, indices]),
        np.concatenate([observed.residual, expected]),
        np.concatenate([observed.variance, variance]),
    )
