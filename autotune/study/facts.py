"""What one outcome settles about others: the only place where that is decided.

If a candidate ran out of memory, whatever needs at least as much runs out too, by the knobs' own declarations of
how they move memory; and where one fits, so does what needs at most as much. An engine that found no room for itself says
nothing of the kind: its reservation may be too small as well as too large, and the failure's own row of the
table says which. What could not even be loaded cannot be loaded for the next candidate either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.candidate import Candidate
from autotune.failures import pushes
from autotune.measurement import Failure, Measurement, Outcome
from autotune.recommendation import Trial
from autotune.study.table import Flags, Table

ENGINE_CAUSES = frozenset({"kv_cache", "engine_startup"})
"""Failures of the rollout engine to find room for itself."""

SLEEPS = frozenset({"vllm_enable_sleep_mode", "sleep_level"})
"""What an engine does once it stands; it makes no room while the engine is being started."""

BESIDE_TRAINING = (Outcome.OOM_ROLLOUT, Outcome.OOM_SYNC)
"""Ends of those who ran out while the engine was awake."""

SHARE = "vllm_gpu_memory_utilization"
"""The knob that `free_share` of a failure's numbers is about."""


@dataclass(frozen=True)
class Facts:
    """By candidate of the table."""

    impossible: Flags
    """Cannot fit: another one ran out that needs at most as much."""

    possible: Flags
    """Fits: another one fitted that needs at least as much."""


class Settled:
    """Everything that the outcomes so far settle; asked again with more of them, only what is new is looked at."""

    def __init__(self, table: Table) -> None:
        self._table, self._heard, self._facts = table, tuple[Trial, ...](), facts_of(table, ())

    def after(self, trials: Sequence[Trial]) -> Facts:
        known = len(self._heard)
        if len(trials) < known or any(one is not other for one, other in zip(self._heard, trials, strict=False)):
            known, self._facts = 0, facts_of(self._table, ())
        if len(trials) > known:
            new, old = facts_of(self._table, trials[known:]), self._facts
            impossible = old.impossible | new.impossible
            self._facts = Facts(impossible=impossible, possible=(old.possible | new.possible) & ~impossible)
        self._heard = tuple(trials)
        return self._facts


def facts_of(table: Table, trials: Sequence[Trial]) -> Facts:
    """Everything that these outcomes settle, those that were measured included."""
    impossible, possible = np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for trial in trials:
        place = table.place.get(trial.candidate.id)
        if place is None:
            continue
        if trial.verdict.fits:
            possible |= table.demanding_at_most(place)
        elif ran_out(trial.measurement):
            impossible |= table.demanding_at_least(place)
        if trial.measurement.outcome is Outcome.OOM_LOAD:
            impossible |= table.loads == table.loads[place]
        if _found_training_gone(trial):
            impossible |= table.needing_any(table.beside_batches(place))
        impossible |= _engine_has_no_room(table, trial)
    return Facts(impossible=impossible, possible=possible & ~impossible)


def ran_out(measurement: Measurement) -> bool:
    """Whether the outcome is of the kind that rules out everything bigger."""
    if measurement.outcome is Outcome.OK:
        return measurement.memory.peak_bytes is not None and measurement.memory.peak_bytes > measurement.memory.limit_bytes
    return measurement.outcome.is_out_of_memory and not blames_engine(measurement)


def _found_training_gone(trial: Trial) -> bool:
    """Whether it ran out beside an engine that sleeps through training: when such a one is awake, what a training step needs has
    been given back, so that neither a smaller batch nor recomputing would have helped."""
    sleeps = any(trial.candidate.settings.get(name) for name in SLEEPS)
    return sleeps and trial.measurement.outcome in BESIDE_TRAINING and not blames_engine(trial.measurement)


def blames_engine(measurement: Measurement) -> bool:
    """Whether the engine found too little room for itself, so that a larger share may cure it. Where the failure's row of the
    table is not known, that may be so."""
    failure = measurement.failure
    if failure is None or failure.cause not in ENGINE_CAUSES:
        return False
    return failure.row is None or pushes(failure.cause, failure.row).get(SHARE) == "raise"


def _engine_has_no_room(table: Table, trial: Trial) -> Flags:
    """Loads that differ from this failed one only where it has to be moved, and lie no better there."""
    failure = trial.measurement.failure
    settled = np.zeros(len(table), dtype=bool)
    if failure is None or failure.cause not in ENGINE_CAUSES or failure.row is None:
        return settled
    towards = {name: way for name, way in pushes(failure.cause, failure.row).items() if name in trial.candidate.load}
    if not towards:
        return settled
    beside = {*towards, *(SLEEPS if failure.phase == "load" else ())}
    for number, other in table.load_examples.items():
        if _same_but(trial.candidate, other, beside) and (
            _no_better(trial.candidate, other, towards) or _too_much(other, failure)
        ):
            settled |= table.loads == number
    return settled


def _same_but(failed: Candidate, other: Candidate, beside: Collection[str]) -> bool:
    names = {*failed.load, *other.load} - set(beside)
    return all(failed.load.get(name) == other.load.get(name) for name in names)


def _no_better(failed: Candidate, other: Candidate, towards: Mapping[str, str]) -> bool:
    """Whether no loaded setting moved to where the failure would be cured."""
    return all(_not_beyond(failed.load.get(name), other.load.get(name), way) for name, way in towards.items())


def _not_beyond(failed: object, other: object, way: str) -> bool:
    if failed == other:
        return True
    if not isinstance(failed, (int, float)) or not isinstance(other, (int, float)):
        return False
    return other < failed if way == "raise" else other > failed


def _too_much(other: Candidate, failure: Failure) -> bool:
    """Whether this load claims a larger share than the failed one's own message says is free."""
    share, free = other.load.get(SHARE), failure.numbers.get("free_share")
    return free is not None and isinstance(share, float) and share > free
