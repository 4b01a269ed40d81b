"""Study: a searcher on a setup's machine for one seed, and its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_machines import Machine, Optimum
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
    what = setup(name)
    machine = what.machine(seed)
    optimum = what.optimum(machine)
    if searcher == SECOND:
        first: list[Trial] = []
        _ours(what, OURS, seed, machine, optimum, kept=first)
        machine.now = 0.0
        return replace(_ours(what, OURS, seed, machine, optimum, earlier=first), searcher=SECOND)
    return (
        _ours(what, searcher, seed, machine, optimum)
        if searcher in SEARCHERS
        else _theirs(what, searcher, seed, machine, optimum)
    )


def _theirs(
    what: Setup,
    rival: str,
    seed: int,
    machine: Machine,
    optimum: Optimum | None,
) -> Result:
    arena = Arena(
        machine=machine,
        space=what.posed.job.space,
        candidates=what.posed.candidates,
        most=MOST,
    )
    began = time.process_time()
    probes = run(RIVALS[rival], arena, seed)
    own = (time.process_time() - began) / max(1, len(probes))
    chosen = _incumbent(what, probes)
    return Result(
        **_along(what, probes, optimum),
        setup=what.name,
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
        ask_tell_seconds=own,
    )


def _ours(
    what: Setup,
    searcher: str,
    seed: int,
    machine: Machine,
    optimum: Optimum | None,
    *,
    earlier: Sequence[Trial] = (),
    kept: list[Trial] | None = None,
) -> Result:
    sampler, options = SEARCHERS[searcher]
    task = what.posed.job.task
    task = replace(task, workload=replace(task.workload, seed=seed))
    most = what.posed.job.max_probes if sampler == "value" else MOST
    job = replace(
        what.posed.job,
        task=task,
        sampler=sampler,  # type: ignore[arg-type]
        max_probes=most,
    )
    opened = open_study(
        job,
        what.posed.candidates,
        what.posed.baseline,
        predictions=what.predictions,
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
    if kept is not None:
        kept.extend(opened.view.all)
    refused = opened.view.screened & (optimum.members if optimum else frozenset())
    wrongly = [one for one in refused if optimum and one in optimum.speeds]
    chosen = answer.winner.candidate if answer.winner else None
    return Result(
        **_along(what, watch.probes, optimum),
        setup=what.name,
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
        refused_better=any(optimum.speeds[one] == optimum.speed for one in wrongly if optimum),
        proven=answer.proven,
        ask_tell_seconds=watch.own_seconds / max(1, len(watch.probes) + watch.confirmations),
    )


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
    what: Setup,
    probes: Sequence[Probe],
    optimum: Optimum | None,
) -> dict[str, Any]:
    """Return the figures read from the probes in their order."""
    shares = [
        _share(optimum, _incumbent(what, probes[: count + 1])) for count in range(len(probes))
    ]
    reached = next((place for place, share in enumerate(shares) if share >= 0.95), None)
    high = next((place for place, share in enumerate(shares) if share >= 0.97), None)
    first = _first_choice(what, optimum)
    tried = [one for one in probes if one.candidate != what.posed.baseline]
    better = (
        place
        for place, one in enumerate(tried, 1)
        if first is not None and _is_better(optimum, one.candidate, first)
    )
    return {
        "share_after": {
            count: shares[min(count, len(shares)) - 1] if shares else 0.0 for count in AFTER
        },
        "out_of_memory": sum(one.measurement.outcome.is_out_of_memory for one in probes),
        "seconds_to_95": None if reached is None else probes[reached].ended,
        "probes_to_97": None if high is None else high + 1,
        "first_choice": first,
        "noticed_after": next(better, None),
    }


def _first_choice(what: Setup, optimum: Optimum | None) -> float | None:
    """Return the share of what prediction alone would choose: the fastest that is not refused."""
    members = optimum.members if optimum else frozenset()
    told = [
        what.predictions[one.id]
        for one in what.posed.candidates
        if one.id in members and one.id in what.predictions
    ]
    rates = {
        one.candidate_id: one.tokens_per_second.value
        for one in told
        if one.fits is not False and one.tokens_per_second
    }
    if optimum is None or not rates:
        return None
    return optimum.speeds.get(max(rates, key=lambda name: rates[name]), 0.0) / optimum.speed


def _is_better(
    optimum: Optimum | None,
    candidate: Candidate,
    first: float,
) -> bool:
    return _share(optimum, candidate) > first * NOTICED


def _incumbent(what: Setup, probes: Sequence[Probe]) -> Candidate | None:
    """The same rule for all: the fastest measured of what was seen to fit, in the most preferred
    tier with anything.
    """
    fitting = {one.candidate: one.speed for one in probes if one.fits}
    for tier in tiers_of(what.posed.job.space, what.posed.candidates) if fitting else ():
        here = [one for one in tier.candidates if one in fitting]
        if here:
            return max(here, key=lambda one: fitting[one])
    return None


def _share(optimum: Optimum | None, chosen: Candidate | None) -> float:
    return 0.0 if optimum is None else optimum.share(chosen)


def _fitting(optimum: Optimum | None) -> int:
    return len(optimum.speeds) if optimum else 0


def _loads(probes: Sequence[Probe]) -> int:
    return sum(one.measurement.cost.load_seconds > 0 for one in probes)
