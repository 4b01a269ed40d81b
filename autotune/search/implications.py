"""Implications of one outcome for other candidates. No other module derives any.

- Out of memory: every candidate that needs at least as much memory, by the knobs' declared effects, fails too.
- Fits: every candidate that needs at most as much fits too.
- An engine without room for itself: its share may be too small or too large; the failure's table row has the direction.
- A load that failed: it fails for every candidate with the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Measurement, Outcome
from autotune.failures.table import directions_after
from autotune.search.surrogate.candidate_table import BoolArray, CandidateTable

ENGINE_CAUSES = frozenset({"kv_cache", "engine_startup"})  # Causes where the rollout engine lacks room for itself
SLEEP_KNOBS = frozenset({"vllm_enable_sleep_mode", "sleep_level"})  # Sleep mode of a running engine: no effect on its start
ENGINE_AWAKE = (Outcome.OOM_ROLLOUT, Outcome.OOM_SYNC)  # Out-of-memory outcomes while the engine is awake
SHARE_KNOB = "vllm_gpu_memory_utilization"  # Knob that `free_share` among a failure's numbers refers to


@dataclass(frozen=True)
class Implications:
    """Certain outcomes by row of the table."""

    impossible: BoolArray  # A candidate that needs at most as much ran out of memory
    possible: BoolArray  # A candidate that needs at least as much fits


class Implied:
    """Implications of all outcomes so far; a call with more trials evaluates the new ones alone."""

    def __init__(self, table: CandidateTable) -> None:
        self._table, self._trials, self._found = table, tuple[Trial, ...](), implications_of(table, ())

    def after(self, trials: Sequence[Trial]) -> Implications:
        known = len(self._trials)
        if len(trials) < known or any(one is not other for one, other in zip(self._trials, trials, strict=False)):
            known, self._found = 0, implications_of(self._table, ())
        if len(trials) > known:
            new, old = implications_of(self._table, trials[known:]), self._found
            impossible = old.impossible | new.impossible
            self._found = Implications(impossible=impossible, possible=(old.possible | new.possible) & ~impossible)
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
        # An engine with sleep mode that ran out while awake: the training step's memory is free at that time, so neither a
        # smaller batch nor recomputation helps.
        sleeps = any(trial.candidate.settings.get(name) for name in SLEEP_KNOBS)
        if sleeps and trial.measurement.outcome in ENGINE_AWAKE and not blames_engine(trial.measurement):
            impossible |= table.demanding_at_least_any(table.differing_in_batches(index))
        impossible |= _loads_without_engine_room(table, trial)
    return Implications(impossible=impossible, possible=possible & ~impossible)


def ran_out(measurement: Measurement) -> bool:
    """Return True if the outcome rules out every more demanding candidate."""
    if measurement.outcome is Outcome.OK:
        return measurement.memory.peak_bytes is not None and measurement.memory.peak_bytes > measurement.memory.limit_bytes
    return measurement.outcome.is_out_of_memory and not blames_engine(measurement)


def blames_engine(measurement: Measurement) -> bool:
    """Return True if a larger share may cure the engine's lack of room. Assumed if the failure's table row is unknown."""
    failure = measurement.failure
    if failure is None or failure.cause not in ENGINE_CAUSES:
        return False
    return failure.row is None or directions_after(failure.cause, failure.row).get(SHARE_KNOB) == "raise"


def _loads_without_engine_room(table: CandidateTable, trial: Trial) -> BoolArray:
    """Return the loads that differ from this failed one only in the settings to move, and not towards the cure."""
    failure = trial.measurement.failure
    found = np.zeros(len(table), dtype=bool)
    if failure is None or failure.cause not in ENGINE_CAUSES or failure.row is None:
        return found
    failed, free = trial.candidate.load, failure.numbers.get("free_share")
    towards = {name: way for name, way in directions_after(failure.cause, failure.row).items() if name in failed}
    if not towards:
        return found
    ignored = {*towards, *(SLEEP_KNOBS if failure.phase == "load" else ())}
    for number, other in table.load_examples.items():
        load, share = other.load, other.load.get(SHARE_KNOB)
        if any(failed.get(name) != load.get(name) for name in {*failed, *load} - ignored):
            continue
        # No setting moved in the direction that cures the failure, or a larger share is claimed than the message reports as free.
        no_better = all(_not_beyond(failed.get(name), load.get(name), way) for name, way in towards.items())
        if no_better or (free is not None and isinstance(share, float) and share > free):
            found |= table.loads == number
    return found


def _not_beyond(failed: object, other: object, way: str) -> bool:
    if failed == other:
        return True
    if not isinstance(failed, (int, float)) or not isinstance(other, (int, float)):
        return False
    return other < failed if way == "raise" else other > failed
