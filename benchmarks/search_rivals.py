"""Other searches, each in a few lines, with the same measurements, clock, costs and first
candidate.

Each is written from its published description without the parts of another framework (models,
launchers). Each gets more than in its original: methods for the batch size alone are repeated over
the other settings.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from search_machines import Machine

from autotune.core.measurement import Measurement, judge
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, SearchSpace
from autotune.search.loop import LONG_PROBE, SHORT_PROBE
from autotune.search.trial_view import tiers_of

MICRO = "per_device_train_batch_size"
GROWN = 0.05
"""DeepSpeed's autotuner calls less than this a plateau (deepspeed/autotuning/constants.py)."""

MEMORY_SHARE = 0.9
"""Share of memory that AReno uses by default (areno/cli/auto_tune.py)."""

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", module="optuna")


class Enough(Exception):
    """Raised when all probes are used."""


@dataclass(frozen=True)
class Probe:
    """Probe of a search."""

    candidate: Candidate
    measurement: Measurement
    fits: bool
    ended: float
    """Seconds on the machine's clock."""

    @property
    def speed(self) -> float:
        speed = self.measurement.ranking_speed
        return speed.tokens_per_second if self.fits and speed else 0.0


@dataclass
class Arena:
    """Search on one machine."""

    machine: Machine
    space: SearchSpace
    candidates: Sequence[Candidate]
    most: int
    """Maximum number of probes."""

    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    baseline: Candidate | None = None

    probes: list[Probe] = field(default_factory=list)

    def confirm_best(self) -> None:
        """Measure the fastest once more, longer, as our search does: the seconds count."""
        fitting = [probe for probe in self.probes if probe.fits]
        if fitting:
            fastest = max(fitting, key=lambda probe: probe.speed)
            self.machine.measure(fastest.candidate, LONG_PROBE)

    def probe(self, candidate: Candidate) -> Probe:
        """Return the probe of a candidate; a repeated one is answered from the record at no
        cost.
        """
        for earlier in self.probes:
            if earlier.candidate == candidate:
                return earlier
        if len(self.probes) >= self.most:
            raise Enough
        measurement = self.machine.measure(candidate, SHORT_PROBE)
        probe = Probe(candidate, measurement, judge(measurement).fits, self.machine.now)
        self.probes.append(probe)
        return probe


Rival = Callable[[Arena, list[Candidate], Candidate, random.Random], None]


def run(
    rival: Rival,
    arena: Arena,
    seed: int,
) -> list[Probe]:
    """Run in the first tier in which a candidate fits, from the most cautious candidate that truly
    fits.

    Both are given to a rival: without them no rival would find them on several GPUs, where the
    nominally most cautious candidate may not fit. A rival that has the predictions starts with the
    baseline, as our search does.
    """
    try:
        for tier in tiers_of(arena.space, arena.candidates):
            fitting = []
            for candidate in tier.candidates:
                if arena.machine.mean_speed(candidate) is not None:
                    fitting.append(candidate)
            if fitting:
                first = safest(fitting)
                if rival in PREDICTED and arena.baseline is not None:
                    first = arena.baseline
                arena.probe(first)
                rival(arena, list(tier.candidates), first, random.Random(seed))
                break
    except Enough:
        pass
    arena.confirm_best()
    return arena.probes


def safest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the safest start: generation by transformers, everything sharded, recomputed, the
    smallest micro-batch."""
    sharded = ("zero3", "zero2", "zero1", "ddp", "none")

    def demand(candidate: Candidate) -> tuple[object, ...]:
        settings = candidate.settings
        kind = settings.get("sharding")
        place = sharded.index(str(kind)) if kind in sharded else 0
        return (
            settings["use_vllm"],
            place,
            not settings["gradient_checkpointing"],
            settings[MICRO],
            str(sorted(candidate.knobs.items(), key=str)),
        )

    return min(candidates, key=demand)


def at_random(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    for candidate in dice.sample(tier, len(tier)):
        arena.probe(candidate)


def tpe(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """Bergstra et al. 2011, as Optuna has it, with memory as a constraint (c-TPE, Watanabe and
    Hutter 2022).
    """
    _optuna(arena, tier, TPESampler(seed=dice.randrange(2**31), n_startup_trials=5), dice)


def gp(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """A Gaussian process with constrained expected improvement, as Optuna has it."""
    _optuna(arena, tier, GPSampler(seed=dice.randrange(2**31), n_startup_trials=5), dice)


def _over(probe: Probe) -> float:
    """Above zero where memory ran out; below by what is left of the limit."""
    memory = probe.measurement.memory
    return (
        (memory.peak_bytes or memory.limit_bytes) / memory.limit_bytes - 1 - 1e-6
        if probe.fits
        else 0.05
    )


def _optuna(
    arena: Arena,
    tier: list[Candidate],
    sampler: BaseSampler,
    dice: random.Random,
) -> None:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    choices = {}
    for knob in arena.space.knobs:
        values_of_knob = list(dict.fromkeys(str(c.knobs.get(knob.name)) for c in tier))
        if len(values_of_knob) > 1:
            choices[knob.name] = values_of_knob
    numeric = {name: values for name, values in choices.items() if _are_numbers(values)}

    def place(candidate: Candidate, name: str) -> float | str:
        text = str(candidate.knobs.get(name))
        return math.log(float(text)) if name in numeric else text

    def places(candidate: Candidate) -> dict[str, float | str]:
        return {name: place(candidate, name) for name in choices}

    def distributions() -> dict[str, optuna.distributions.BaseDistribution]:
        return {name: _distribution(values) for name, values in choices.items()}

    def probe_and_tell(candidate: Candidate) -> None:
        """Report a failure as slow as the slowest: a zero would distort every model of the
        speed.
        """
        probe = arena.probe(candidate)
        fitting = [probe.speed for probe in arena.probes if probe.fits]
        study.add_trial(
            optuna.trial.create_trial(
                params=places(candidate),
                distributions=distributions(),
                value=probe.speed if probe.fits else min(fitting, default=0.0),
                system_attrs={"constraints:memory": _over(probe)},
            )
        )

    start = arena.probes[-1].candidate
    if start in tier:
        probe_and_tell(start)
    remaining = [candidate for candidate in tier if candidate != start]
    while remaining:
        trial = study.ask(distributions())
        proposal = trial.params
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        nearest = min(
            remaining,
            key=lambda candidate: (_apart(proposal, places(candidate)), dice.random()),
        )
        remaining.remove(nearest)
        probe_and_tell(nearest)


def _are_numbers(values: Sequence[str]) -> bool:
    try:
        return all(float(value) > 0 for value in values)
    except ValueError:
        return False


def _distribution(values: list[str]) -> optuna.distributions.BaseDistribution:
    if not _are_numbers(values):
        return optuna.distributions.CategoricalDistribution(values)
    logs = [math.log(float(value)) for value in values]
    return optuna.distributions.FloatDistribution(min(logs), max(logs))


def _apart(proposal: dict[str, object], values: dict[str, float | str]) -> float:
    distance = 0.0
    for name, value in proposal.items():
        if isinstance(value, float):
            distance += abs(value - float(values[name]))
        else:
            distance += value != values[name]
    return distance


def _ladders(tier: list[Candidate], first: Candidate) -> Iterator[list[Candidate]]:
    """Candidates that differ in their batch alone, smallest first; those beside the first
    candidate come first.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(tier, key=lambda candidate: _moved(candidate, first)):
        shape = {}
        for name, value in candidate.knobs.items():
            if name not in (MICRO, "gradient_accumulation_steps"):
                shape[name] = value
        groups.setdefault(str(shape), []).append(candidate)
    for members in groups.values():
        yield sorted(members, key=lambda candidate: int(candidate.settings[MICRO] or 0))


def _moved(candidate: Candidate, first: Candidate) -> int:
    moved = 0
    for name, value in candidate.knobs.items():
        if name not in (MICRO, "gradient_accumulation_steps"):
            moved += first.knobs.get(name) != value
    return moved


def doubling(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """Lightning's BatchSizeFinder (mode binsearch): double until memory runs out, then bisect; the
    largest that fits is taken. accelerate's find_executable_batch_size goes the other way, down
    from a batch that is too large.
    """
    for ladder in _ladders(tier, first):
        low, step, place, high = -1, 1, 0, len(ladder)
        while place < high:
            if arena.probe(ladder[place]).fits:
                low, place, step = place, place + step, step * 2
            else:
                high = place
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if arena.probe(ladder[middle]).fits else (low, middle)


def first_fit(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """AReno's auto-tuner: the largest engine below nine tenths of the memory, then the largest
    micro-batch below it.
    """
    fixed = {}
    for name, value in first.knobs.items():
        if name not in (MICRO, "gradient_accumulation_steps"):
            fixed[name] = value

    def is_small(candidate: Candidate) -> bool:
        return candidate.settings[MICRO] == first.settings[MICRO] and bool(
            candidate.settings["gradient_checkpointing"]
        )

    def same(candidate: Candidate) -> bool:
        for name, value in fixed.items():
            is_engines = name.startswith(("use_vllm", "vllm_"))
            if not is_engines and candidate.knobs.get(name) != value:
                return False
        return True

    engines = [candidate for candidate in tier if is_small(candidate) and same(candidate)]
    engines.sort(
        key=lambda candidate: (
            not candidate.settings["use_vllm"],
            -float(candidate.knobs.get("vllm_gpu_memory_utilization") or 0),
        )
    )
    chosen = next((candidate for candidate in engines if _below(arena.probe(candidate))), first)
    shape = {}
    for name, value in chosen.knobs.items():
        if name not in (MICRO, "gradient_accumulation_steps"):
            shape[name] = value
    ladder = []
    for candidate in tier:
        if all(candidate.knobs.get(name) == value for name, value in shape.items()):
            ladder.append(candidate)
    for candidate in sorted(ladder, key=lambda candidate: -int(candidate.settings[MICRO] or 0)):
        if _below(arena.probe(candidate)):
            return


def _below(probe: Probe) -> bool:
    memory = probe.measurement.memory
    return (
        probe.fits
        and (memory.peak_bytes or memory.limit_bytes) <= MEMORY_SHARE * memory.limit_bytes
    )


def deepspeed_grid(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """DeepSpeed's autotuner: stages from the least sharding on; in each the micro-batch is doubled
    until speed levels off or memory runs out, and a stage no better than the one before ends the
    search. Repeated for the settings it does not know.
    """
    order = ("none", "ddp", "zero1", "zero2", "zero3")
    outer: dict[str, dict[str, list[Candidate]]] = {}
    for ladder in _ladders(tier, first):
        for candidate in ladder:
            shape = {}
            for name, v in candidate.knobs.items():
                if name not in (MICRO, "gradient_accumulation_steps", "sharding"):
                    shape[name] = v
            outer.setdefault(str(shape), {}).setdefault(
                str(candidate.settings.get("sharding")), []
            ).append(candidate)
    for stages in outer.values():
        before = 0.0
        for stage in sorted(stages, key=lambda name: order.index(name) if name in order else 0):
            best = 0.0
            for candidate in stages[stage]:
                probe = arena.probe(candidate)
                if not probe.fits or probe.speed < best * (1 + GROWN):
                    best = max(best, probe.speed)
                    break
                best = probe.speed
            if 0 < best < before:
                break
            before = max(before, best)


WITHOUT_GAIN = 5
"""Probes without a gain after which a list in predicted order is given up."""


def predicted_order(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """Fastest by prediction first, without those that need more than one that ran out of memory."""
    _in_order(arena, tier, _Corrections)


def corrected_order(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    """The same, with the median of measured / predicted seconds of each phase as a factor."""
    _in_order(arena, tier, lambda: _Corrections.fitted(arena))


@dataclass(frozen=True)
class _Corrections:
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Factor by phase."""

    memory: float = 1.0

    @classmethod
    def fitted(cls, arena: Arena) -> _Corrections:
        factors: dict[str, list[float]] = {}
        peaks = []
        for probe in arena.probes:
            prediction = arena.predictions.get(probe.candidate.id)
            speed = probe.measurement.ranking_speed
            if prediction is None or speed is None or not probe.fits:
                continue
            cycles = sum(speed.cycle_seconds)
            tokens = sum(speed.cycle_loss_tokens)
            scale = _cycle_seconds(prediction, tokens / len(speed.cycle_seconds))
            predicted_sum = sum(_phases(prediction).values())
            for name, predicted in _phases(prediction).items():
                measured = speed.phase_seconds.get(name, 0.0) / cycles * (cycles / len(speed.rates))
                if predicted > 0 and measured > 0:
                    share = predicted / predicted_sum * scale
                    factors.setdefault(name, []).append(measured / share)
            peak = probe.measurement.memory.peak_bytes
            if peak:
                peaks.append(peak / prediction.peak_memory_bytes.value)
        medians = {name: statistics.median(values) for name, values in factors.items()}
        return cls(medians, statistics.median(peaks) if peaks else 1.0)

    def rate(self, prediction: Prediction) -> float:
        phases = _phases(prediction)
        total = sum(phases.values())
        corrected = sum(self.seconds.get(name, 1.0) * seconds for name, seconds in phases.items())
        assert prediction.tokens_per_second is not None
        rate = prediction.tokens_per_second.value
        return rate if not total else rate * total / corrected

    def fits(self, prediction: Prediction) -> bool:
        need = prediction.peak_memory_bytes.value * self.memory
        return prediction.failure is None and need <= prediction.limit_bytes


def _phases(prediction: Prediction) -> dict[str, float]:
    return {name: estimate.value for name, estimate in prediction.seconds_by_phase.items()}


def _cycle_seconds(prediction: Prediction, tokens: float) -> float:
    assert prediction.tokens_per_second is not None
    return tokens / prediction.tokens_per_second.value


def _in_order(
    arena: Arena,
    tier: list[Candidate],
    corrections_now: Callable[[], _Corrections],
) -> None:
    remaining = []
    for candidate in tier:
        prediction = arena.predictions.get(candidate.id)
        if prediction is not None and prediction.tokens_per_second is not None:
            remaining.append(candidate)
    lowest_failure = math.inf
    best, without_gain = 0.0, 0
    while remaining and without_gain < WITHOUT_GAIN:
        corrections = corrections_now()
        open_candidates = []
        for candidate in remaining:
            prediction = arena.predictions[candidate.id]
            if corrections.fits(prediction) and prediction.peak_memory_bytes.value < lowest_failure:
                open_candidates.append(candidate)
        if not open_candidates:
            return
        last = max(
            open_candidates,
            key=lambda candidate: corrections.rate(arena.predictions[candidate.id]),
        )
        remaining.remove(last)
        probe = arena.probe(last)
        without_gain = 0 if probe.speed > best else without_gain + 1
        best = max(best, probe.speed)
        if probe.measurement.outcome.is_out_of_memory:
            peak = arena.predictions[last.id].peak_memory_bytes.value
            lowest_failure = min(lowest_failure, peak)


def _predicted_to_fit(arena: Arena, tier: list[Candidate]) -> list[Candidate]:
    fitting = []
    for candidate in tier:
        prediction = arena.predictions.get(candidate.id)
        if prediction is None or _Corrections().fits(prediction):
            fitting.append(candidate)
    return fitting


def tpe_over_fitting(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    tpe(arena, _predicted_to_fit(arena, tier), first, dice)


def gp_over_fitting(
    arena: Arena,
    tier: list[Candidate],
    first: Candidate,
    dice: random.Random,
) -> None:
    gp(arena, _predicted_to_fit(arena, tier), first, dice)


PREDICTED = (predicted_order, corrected_order, tpe_over_fitting, gp_over_fitting)
"""Rivals that have the predictions."""

RIVALS: dict[str, Rival] = {
    "random": at_random,
    "TPE": tpe,
    "GP": gp,
    "doubling, then bisecting": doubling,
    "descending first-fit": first_fit,
    "DeepSpeed-like grid": deepspeed_grid,
    "predicted order": predicted_order,
    "corrected order": corrected_order,
    "TPE of what fits": tpe_over_fitting,
    "GP of what fits": gp_over_fitting,
}
