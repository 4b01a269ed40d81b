"""Study: a searcher on a setup's machine for one seed, and its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_machines import Machine, Optimum, Simulated
from search_rivals import RIVALS, Arena, Probe, run
from search_setups import Setup, setup

from autotune.core.answer import Trial
from autotune.core.events import Event, ProbeEnded
from autotune.core.space import Candidate
from autotune.search.loop import Clock, run_search
from autotune.search.study import Study, open_study
from autotune.search.surrogate.estimates import SearchOptions
from autotune.search.trial_view import tiers_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the executor of the tests

from tests.inline_executor import InlineExecutor

OURS = "autotune"
BARE = SearchOptions(
    screen=False,
    imply=False,
    calibrate=False,
    prune=False,
)
SEARCHERS: Mapping[str, tuple[str, SearchOptions]] = {
    OURS: ("value", SearchOptions()),
    "TPE, with our screen": ("tpe", SearchOptions()),
    "GP, with our screen": ("gp", SearchOptions()),
    "autotune without the screen": ("value", SearchOptions(screen=False)),
    "autotune without implications": ("value", SearchOptions(imply=False)),
    "autotune without costs": ("value", SearchOptions(value_per_second=False)),
    "autotune without correction": ("value", SearchOptions(calibrate=False)),
    "autotune without pruning": ("value", SearchOptions(prune=False)),
}
"""Searchers that use autotune's own loop."""

SECOND = "autotune, second study"
"""Our search again on the machine that an earlier study has measured."""

ABLATIONS = tuple(name for name in SEARCHERS if name.startswith(f"{OURS} without"))
MOST = 30
"""Probes that a rival gets at most."""

AFTER = (5, 10, 20)
NOTICED = 1.05


@dataclass(frozen=True)
class Result:
    """Result of one study."""

    setup: str
    searcher: str
    seed: int
    share_after: Mapping[int, float]
    """Best found so far as a share of the optimum, after so many probes."""

    share: float
    """Share of the final recommendation."""

    probes: int
    confirmations: int
    out_of_memory: int
    seconds: float
    seconds_to_95: float | None
    probes_to_97: int | None
    loads: int
    feasible: bool
    nothing_fits: bool
    refused: int
    """Candidates that stayed refused by prediction in the tier of the optimum ..."""

    falsely_refused: int
    """Number of these that truly fit."""

    fitting: int
    """Candidates of that tier that truly fit."""

    refused_better: bool
    """True where a refused one is the optimum."""

    proven: str
    ask_tell_seconds: float
    """The search's own time per probe."""

    first_choice: float | None = None
    """Share of the optimum of the candidate that prediction alone would choose; None without
    predictions.
    """

    runs_out_later: bool | None = None
    """True where a long training of the recommended candidate runs out of memory; None: nothing is
    recommended, or nothing known.
    """

    noticed_after: int | None = None
    """Probes after the baseline's until one was truly better than that choice by NOTICED; None:
    never.
    """


def study(
    name: str,
    searcher: str,
    seed: int,
) -> Result:
    """The same machine for all searchers of one seed."""
    posed_setup = setup(name)
    machine = posed_setup.machine(seed)
    optimum = posed_setup.optimum(machine)
    if searcher == SECOND:
        first: list[Trial] = []
        _ours(posed_setup, OURS, seed, machine, optimum, recorded=first)
        machine.now = 0.0
        return replace(
            _ours(posed_setup, OURS, seed, machine, optimum, earlier=first), searcher=SECOND
        )
    return (
        _ours(posed_setup, searcher, seed, machine, optimum)
        if searcher in SEARCHERS
        else _theirs(posed_setup, searcher, seed, machine, optimum)
    )


def _theirs(
    posed_setup: Setup,
    rival: str,
    seed: int,
    machine: Machine,
    optimum: Optimum | None,
) -> Result:
    arena = Arena(
        machine=machine,
        space=posed_setup.posed.job.space,
        candidates=posed_setup.posed.candidates,
        most=MOST,
        predictions=posed_setup.predictions,
        baseline=posed_setup.posed.baseline,
    )
    began = time.process_time()
    probes = run(RIVALS[rival], arena, seed)
    milliseconds = (time.process_time() - began) / max(1, len(probes))
    chosen = _incumbent(posed_setup, probes)
    return Result(
        **_along(posed_setup, probes, optimum),
        setup=posed_setup.name,
        searcher=rival,
        seed=seed,
        share=_share(optimum, chosen),
        probes=len(probes),
        confirmations=0,
        seconds=machine.now,
        loads=_loads(probes),
        feasible=optimum is not None,
        nothing_fits=chosen is None,
        refused=0,
        falsely_refused=0,
        fitting=_fitting(optimum),
        refused_better=False,
        proven="",
        ask_tell_seconds=milliseconds,
        runs_out_later=_runs_out_later(machine, chosen, seed),
    )


def _ours(
    posed_setup: Setup,
    searcher: str,
    seed: int,
    machine: Machine,
    optimum: Optimum | None,
    *,
    earlier: Sequence[Trial] = (),
    recorded: list[Trial] | None = None,
) -> Result:
    sampler, options = SEARCHERS[searcher]
    task = posed_setup.posed.job.task
    task = replace(task, workload=replace(task.workload, seed=seed))
    probe_limit = posed_setup.posed.job.max_probes if sampler == "value" else MOST
    job = replace(
        posed_setup.posed.job,
        task=task,
        sampler=sampler,  # type: ignore[arg-type]
        max_probes=probe_limit,
    )
    opened = open_study(
        job,
        posed_setup.posed.candidates,
        posed_setup.posed.baseline,
        predictions=posed_setup.predictions,
        options=options,
        earlier=earlier,
    )
    watch = _Watch(machine, opened)
    executor = InlineExecutor(machine.measure)
    answer = run_search(
        job,
        study=opened,
        executor=executor,
        listener=watch.hear,
        clock=Clock(job.budget_seconds, now=lambda: machine.now),
    )
    if recorded is not None:
        recorded.extend(opened.view.all)
    refused = opened.view.screened & (optimum.members if optimum else frozenset())
    wrongly = [candidate for candidate in refused if optimum and candidate in optimum.speeds]
    chosen = answer.winner.candidate if answer.winner else None
    return Result(
        **_along(posed_setup, watch.probes, optimum),
        setup=posed_setup.name,
        searcher=searcher,
        seed=seed,
        share=_share(optimum, chosen),
        probes=len(watch.probes),
        confirmations=watch.confirmations,
        seconds=machine.now,
        loads=executor.loads,
        feasible=optimum is not None,
        nothing_fits=chosen is None,
        refused=len(refused),
        falsely_refused=len(wrongly),
        fitting=_fitting(optimum),
        refused_better=any(
            optimum.speeds[candidate] == optimum.speed for candidate in wrongly if optimum
        ),
        proven=answer.proven,
        runs_out_later=_runs_out_later(machine, chosen, seed),
        ask_tell_seconds=watch.own_seconds / max(1, len(watch.probes) + watch.confirmations),
    )


def _runs_out_later(
    machine: Machine,
    chosen: Candidate | None,
    seed: int,
) -> bool | None:
    if chosen is None or not isinstance(machine, Simulated):
        return None
    return machine.runs_out_later(chosen, seed)


class _Watch:
    """Recorder of every probe with the machine's time, and of the study's own time."""

    def __init__(self, machine: Machine, opened: Study) -> None:
        self._machine = machine
        self.probes: list[Probe] = []
        self.confirmations = 0
        self.own_seconds = 0.0
        self._time(opened, "ask")
        self._time(opened, "tell")

    def _time(self, opened: Study, name: str) -> None:
        inner = getattr(opened, name)

        def timed(*arguments: object) -> object:
            began = time.process_time()
            try:
                return inner(*arguments)
            finally:
                self.own_seconds += time.process_time() - began

        setattr(opened, name, timed)

    def hear(self, event: Event) -> None:
        if not isinstance(event, ProbeEnded):
            return
        if event.trial.purpose == "confirm":
            self.confirmations += 1
        else:
            trial = event.trial
            self.probes.append(
                Probe(trial.candidate, trial.measurement, trial.verdict.fits, self._machine.now)
            )


def _along(
    posed_setup: Setup,
    probes: Sequence[Probe],
    optimum: Optimum | None,
) -> dict[str, Any]:
    """Return the figures read from the probes in their order."""
    shares = []
    for count in range(len(probes)):
        shares.append(_share(optimum, _incumbent(posed_setup, probes[: count + 1])))
    reached, high = _first_at_least(shares, 0.95), _first_at_least(shares, 0.97)
    first = _first_choice(posed_setup, optimum)
    tried = [probe for probe in probes if probe.candidate != posed_setup.posed.baseline]
    noticed_after = None
    for place, probe in enumerate(tried, 1):
        if first is not None and _is_better(optimum, probe.candidate, first):
            noticed_after = place
            break
    return {
        "share_after": {
            count: shares[min(count, len(shares)) - 1] if shares else 0.0 for count in AFTER
        },
        "out_of_memory": sum(probe.measurement.outcome.is_out_of_memory for probe in probes),
        "seconds_to_95": None if reached is None else probes[reached].ended,
        "probes_to_97": None if high is None else high + 1,
        "first_choice": first,
        "noticed_after": noticed_after,
    }


def _first_at_least(shares: Sequence[float], share: float) -> int | None:
    for place, reached in enumerate(shares):
        if reached >= share:
            return place
    return None


def _first_choice(posed_setup: Setup, optimum: Optimum | None) -> float | None:
    """Return the share of what prediction alone would choose: the fastest that is not refused."""
    members = optimum.members if optimum else frozenset()
    predictions = []
    for candidate in posed_setup.posed.candidates:
        if candidate.id in members and candidate.id in posed_setup.predictions:
            predictions.append(posed_setup.predictions[candidate.id])
    rates = {}
    for prediction in predictions:
        if prediction.fits is not False and prediction.tokens_per_second:
            rates[prediction.candidate_id] = prediction.tokens_per_second.value
    if optimum is None or not rates:
        return None
    return optimum.speeds.get(max(rates, key=lambda name: rates[name]), 0.0) / optimum.speed


def _is_better(
    optimum: Optimum | None,
    candidate: Candidate,
    first: float,
) -> bool:
    return _share(optimum, candidate) > first * NOTICED


def _incumbent(posed_setup: Setup, probes: Sequence[Probe]) -> Candidate | None:
    """The same rule for all: the fastest measured of what was seen to fit, in the most preferred
    tier with anything.
    """
    fitting = {probe.candidate: probe.speed for probe in probes if probe.fits}
    for tier in (
        tiers_of(posed_setup.posed.job.space, posed_setup.posed.candidates) if fitting else ()
    ):
        measured = [candidate for candidate in tier.candidates if candidate in fitting]
        if measured:
            return max(measured, key=lambda candidate: fitting[candidate])
    return None


def _share(optimum: Optimum | None, chosen: Candidate | None) -> float:
    return 0.0 if optimum is None else optimum.share(chosen)


def _fitting(optimum: Optimum | None) -> int:
    return len(optimum.speeds) if optimum else 0


def _loads(probes: Sequence[Probe]) -> int:
    return sum(probe.measurement.cost.load_seconds > 0 for probe in probes)
