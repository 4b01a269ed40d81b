"""Implications: certain outcomes of candidates that were not measured.

- Out of memory: every candidate that needs at least as much memory, by the knobs' declared effects,
  fails too.
- Fits: every candidate that needs at most as much fits too.
- An engine without room for itself: its share may be too small or too large; the failure's table
  row has the direction.
- A load that failed: it fails for every candidate with the same load.

A failure outweighs a success: a candidate that both rule is impossible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Failure, Measurement, Outcome
from autotune.core.space import Knobs
from autotune.failures.numbers import Numbers
from autotune.failures.remedy_table import directions_after
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable

# Causes where the rollout engine lacks room for itself
ENGINE_CAUSES = frozenset({"kv_cache", "engine_startup"})
# Sleep mode of a running engine: no effect on its start
SLEEP_KNOBS = frozenset({"vllm_enable_sleep_mode", "sleep_level"})
# Out-of-memory outcomes while the engine is awake
ENGINE_AWAKE = (Outcome.OOM_ROLLOUT, Outcome.OOM_SYNC)
# Knob that `free_share` among a failure's numbers refers to
SHARE_KNOB = "vllm_gpu_memory_utilization"


@dataclass(frozen=True)
class Implications:
    """Certain outcomes by row of the table."""

    impossible: BoolArray  # A candidate that needs at most as much ran out of memory
    possible: BoolArray  # A candidate that needs at least as much fits

    def joined(self, newer: Implications) -> Implications:
        impossible = self.impossible | newer.impossible
        either = self.possible | newer.possible
        possible = either & ~impossible
        return Implications(impossible=impossible, possible=possible)


class Implied:
    """Implications of all outcomes so far; a call with more trials evaluates only the new ones."""

    def __init__(self, table: CandidateTable) -> None:
        self._table = table
        self._trials: tuple[Trial, ...] = ()
        self._implications = implications_of(table, ())

    def after(self, trials: Sequence[Trial]) -> Implications:
        if not self._are_continued_by(trials):
            self._trials = ()
            self._implications = implications_of(self._table, ())
        new = trials[len(self._trials) :]
        if new:
            newer = implications_of(self._table, new)
            self._implications = self._implications.joined(newer)
        self._trials = tuple(trials)
        return self._implications

    def _are_continued_by(self, trials: Sequence[Trial]) -> bool:
        if len(trials) < len(self._trials):
            return False
        pairs = zip(self._trials, trials, strict=False)
        return all(evaluated is trial for evaluated, trial in pairs)


def implications_of(table: CandidateTable, trials: Sequence[Trial]) -> Implications:
    """Return everything that these outcomes imply, including for the measured candidates."""
    impossible = np.zeros(len(table), dtype=bool)
    possible = np.zeros(len(table), dtype=bool)
    for trial in trials:
        row = table.row_by_id.get(trial.candidate.id)
        if row is None:
            continue
        if trial.verdict.fits:
            possible |= table.demanding_at_most(row)
        elif ran_out(trial.measurement):
            impossible |= table.demanding_at_least(row)
        if trial.measurement.outcome is Outcome.OOM_LOAD:
            impossible |= table.loads == table.loads[row]
        if _ran_out_asleep_in_training(trial):
            batches = table.differing_in_batches(row)
            impossible |= table.demanding_at_least_any(batches)
        impossible |= _loads_without_engine_room(table, trial)
    return Implications(impossible=impossible, possible=possible & ~impossible)


def ran_out(measurement: Measurement) -> bool:
    """Return True if the outcome rules out every more demanding candidate."""
    memory = measurement.memory
    if measurement.outcome is Outcome.OK:
        return memory.peak_bytes is not None and memory.peak_bytes > memory.limit_bytes
    return measurement.outcome.is_out_of_memory and not blames_engine(measurement)


def blames_engine(measurement: Measurement) -> bool:
    """Return True if a larger share may cure the engine's lack of room. Assumed if the failure's
    table row is unknown.
    """
    failure = measurement.failure
    if failure is None or failure.cause not in ENGINE_CAUSES:
        return False
    if failure.row is None:
        return True
    directions = directions_after(failure.cause, failure.row)
    return directions.get(SHARE_KNOB) == "raise"


def _ran_out_asleep_in_training(trial: Trial) -> bool:
    """Return True if an engine that sleeps during training ran out of memory while awake.

    The training step's memory is free at that time, so neither a smaller batch nor recomputation
    helps.
    """
    measurement = trial.measurement
    settings = trial.candidate.settings
    sleeps = any(settings.get(name) for name in SLEEP_KNOBS)
    is_awake = measurement.outcome in ENGINE_AWAKE
    return sleeps and is_awake and not blames_engine(measurement)


def _loads_without_engine_room(table: CandidateTable, trial: Trial) -> BoolArray:
    """Return True for candidates whose load differs from this failed one only in the settings to
    move, and not towards the cure.
    """
    impossible = np.zeros(len(table), dtype=bool)
    failure = trial.measurement.failure
    failed_load = trial.candidate.load
    if failure is None:
        return impossible
    directions = _directions(failure, failed_load)
    if not directions:
        return impossible
    ignored = set(directions)
    if failure.phase == "load":
        ignored |= SLEEP_KNOBS
    free_share = _free_share(failed_load, failure.numbers)
    for number, example in table.load_examples.items():
        if not _equal_except(failed_load, example.load, ignored):
            continue
        share = example.load.get(SHARE_KNOB)
        exceeds_free = False
        if free_share is not None and isinstance(share, float):
            exceeds_free = share > free_share
        if exceeds_free or _is_no_cure(failed_load, example.load, directions):
            impossible |= table.loads == number
    return impossible


def _free_share(failed_load: Knobs, numbers: Numbers) -> float | None:
    """Return the share that the message reports as free, in the meaning of the knob.

    vLLM reports shares of the whole device, and the knob is one of the limit. The share that it was
    asked for has both meanings: free = knob * reported as free / reported as asked.
    """
    free = numbers.get("free_share")
    requested_share = numbers.get("asked_share")
    share = failed_load.get(SHARE_KNOB)
    if free is None or not requested_share or not isinstance(share, int | float):
        return free
    return share * free / requested_share


def _directions(failure: Failure, failed_load: Knobs) -> dict[str, str]:
    """Return the direction in which each setting of the load must move to cure the failure."""
    if failure.cause not in ENGINE_CAUSES or failure.row is None:
        return {}
    directions = directions_after(failure.cause, failure.row)
    present = {}
    for name, direction in directions.items():
        if name in failed_load:
            present[name] = direction
    return present


def _equal_except(
    failed_load: Knobs,
    load: Knobs,
    ignored: Collection[str],
) -> bool:
    compared = {*failed_load, *load}.difference(ignored)
    return all(failed_load.get(name) == load.get(name) for name in compared)


def _is_no_cure(
    failed: Knobs,
    load: Knobs,
    directions: Mapping[str, str],
) -> bool:
    """Return True if no setting of the load moved in the direction that cures the failure."""
    for name, direction in directions.items():
        before = failed.get(name)
        after = load.get(name)
        if before == after:
            continue
        if not isinstance(before, int | float) or not isinstance(after, int | float):
            return False
        if (direction == "raise") == (after > before):
            return False
    return True
