"""Shorter probes in a short budget: what they save, and what they lose.

A probe at shorter prompts, completions and rollouts ends earlier, so that a budget pays for more of
them. But lengths change the ranking, and a short probe proves nothing about memory: its winner is
measured again at the longest, and the next one where that does not fit. Compared with two ways that
keep the lengths: fewer timed cycles, and no ranking probe at all.

python benchmarks/search_lengths.py              # results/search_lengths.{json,md}

Simulated machines (search_simulator.py), whose truth is known at all lengths. Candidates are probed
in the order of their predicted speed, so that nothing but the probes differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
from search_machines import Optimum, Simulated
from search_setups import Setup, names, setup

from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.search.loop import LONG_PROBE, SHORT_PROBE

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Way:
    """How candidates are ranked before one is confirmed at the longest lengths."""

    name: str
    length: float = 1.0  # share of the longest lengths and of the rollouts
    timed_cycles: int = SHORT_PROBE.timed_cycles
    confirms_each: bool = False  # every probe is a confirmation

    @property
    def plan(self) -> ProbePlan:
        return replace(SHORT_PROBE, timed_cycles=self.timed_cycles)


WAYS = (
    Way(name="longest lengths, three timed cycles"),
    Way(name="half the lengths", length=0.5),
    Way(name="a quarter of the lengths", length=0.25),
    Way(name="longest lengths, one timed cycle", timed_cycles=1),
    Way(name="each confirmed at once", confirms_each=True),
)
SHORTER = (0.5, 0.25)

MINUTES = (4.0, 6.0, 10.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Answer of one simulated search."""

    setup: str
    seed: int
    way: str
    minutes: float
    probes: int
    seconds_per_probe: float | None
    share: float  # of the optimum's speed at the longest lengths; 0: no answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    rank_losses: list[dict[str, Any]] = []
    for name in names():
        if name.startswith("table_") or (arguments.only and name not in arguments.only):
            continue
        for seed in range(arguments.seeds):
            outcomes += searches(name, seed)
            rank_losses += ranking(name, seed)
        print(name, flush=True)
    document = _document(outcomes, rank_losses, arguments.seeds)
    (RESULTS / "search_lengths.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "search_lengths.md").write_text(markdown(document))


def searches(name: str, seed: int) -> Iterator[Outcome]:
    for minutes in MINUTES:
        for way in WAYS:
            yield search(setup(name), seed, way, minutes)


def search(
    posed_setup: Setup,
    seed: int,
    way: Way,
    minutes: float,
) -> Outcome:
    """Probe in the order of the predicted speed, and confirm the fastest within the budget."""
    at_full = _machine(posed_setup, seed)
    optimum = posed_setup.optimum(at_full)
    candidates = _ordered(posed_setup, optimum)
    budget = 60 * minutes
    if way.confirms_each:
        speeds = _confirmations(at_full, candidates, budget)
        seconds = at_full.now
        winner = max(speeds, key=speeds.__getitem__, default=None)
    else:
        probing = at_full if way.length == 1 else at_full.shortened(way.length)
        speeds = _probes(probing, at_full, candidates, way, budget)
        seconds = at_full.now = probing.now
        winner = _confirmed(at_full, speeds, budget)
    return Outcome(
        setup=posed_setup.name,
        seed=seed,
        way=way.name,
        minutes=minutes,
        probes=len(speeds),
        seconds_per_probe=seconds / len(speeds) if speeds else None,
        share=optimum.share(winner) if optimum else 1.0,
    )


def _probes(
    probing: Simulated,
    at_full: Simulated,
    candidates: Sequence[Candidate],
    way: Way,
    budget: float,
) -> dict[Candidate, float]:
    """Return the measured speeds of the probes that leave time for a confirmation."""
    speeds: dict[Candidate, float] = {}
    for candidate in candidates:
        fastest = max(speeds, key=speeds.__getitem__, default=candidate)
        needed = probing.expected_seconds(candidate, way.plan)
        needed += at_full.expected_seconds(fastest, LONG_PROBE)
        if probing.now + needed <= budget:
            measurement = probing.measure(candidate, way.plan)
            if measurement.worst is not None:
                speeds[candidate] = measurement.worst.tokens_per_second
    return speeds


def _confirmations(
    at_full: Simulated,
    candidates: Sequence[Candidate],
    budget: float,
) -> dict[Candidate, float]:
    """Return the measured speeds of confirmations, one for each candidate."""
    speeds: dict[Candidate, float] = {}
    for candidate in candidates:
        if at_full.now + at_full.expected_seconds(candidate, LONG_PROBE) <= budget:
            measurement = at_full.measure(candidate, LONG_PROBE)
            if measurement.worst is not None:
                speeds[candidate] = measurement.worst.tokens_per_second
    return speeds


def _confirmed(
    at_full: Simulated,
    speeds: dict[Candidate, float],
    budget: float,
) -> Candidate | None:
    """Return the fastest that fits at the longest lengths; None where the budget ends first."""
    for candidate in sorted(speeds, key=speeds.__getitem__, reverse=True):
        if at_full.now + at_full.expected_seconds(candidate, LONG_PROBE) > budget:
            continue
        if at_full.measure(candidate, LONG_PROBE).worst is not None:
            return candidate
    return None


def ranking(name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what the ranking at shorter lengths loses if it were known without error, of those that
    fit at the longest.
    """
    posed_setup = setup(name)
    at_full = _machine(posed_setup, seed)
    optimum = posed_setup.optimum(at_full)
    for length in SHORTER:
        short = at_full.shortened(length)
        speeds = {}
        for candidate in _ordered(posed_setup, optimum):
            speed = short.mean_speed(candidate)
            if speed is not None and at_full.mean_speed(candidate) is not None:
                speeds[candidate] = speed
        if optimum is not None and speeds:
            best = max(speeds, key=speeds.__getitem__)
            yield {
                "setup": name,
                "seed": seed,
                "length": length,
                "share": optimum.share(best),
            }


def _ordered(posed_setup: Setup, optimum: Optimum | None) -> list[Candidate]:
    """Return the tier's candidates by predicted speed, without those predicted not to fit."""
    speeds = {}
    for candidate in posed_setup.posed.candidates:
        prediction = posed_setup.predictions[candidate.id]
        is_of_tier = optimum is not None and candidate.id in optimum.members
        if is_of_tier and prediction.fits is not False and prediction.tokens_per_second:
            speeds[candidate] = prediction.tokens_per_second.value
    return sorted(speeds, key=speeds.__getitem__, reverse=True)


def _machine(posed_setup: Setup, seed: int) -> Simulated:
    simulated = posed_setup.machine(seed)
    assert isinstance(simulated, Simulated)
    return simulated


def _document(
    outcomes: Sequence[Outcome],
    rank_losses: Sequence[dict[str, Any]],
    seeds: int,
) -> dict[str, Any]:
    packages = ("numpy", "trl", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    rows = []
    for minutes in MINUTES:
        for way in WAYS:
            group = []
            for outcome in outcomes:
                if outcome.minutes == minutes and outcome.way == way.name:
                    group.append(outcome)
            rows.append(_row(minutes, way, group))
    return {
        "machine": machine.facts(versions),
        "seeds": seeds,
        "searches": rows,
        "ranking": [_rank_row(length, rank_losses) for length in SHORTER],
    }


def _row(
    minutes: float,
    way: Way,
    group: Sequence[Outcome],
) -> dict[str, Any]:
    shares = [outcome.share for outcome in group]
    answered = [share for share in shares if share]
    paid = [outcome.seconds_per_probe for outcome in group if outcome.seconds_per_probe]
    return {
        "minutes": minutes,
        "way": way.name,
        "searches": len(group),
        "answered": len(answered),
        "probes": statistics.fmean(outcome.probes for outcome in group),
        "seconds_per_probe": statistics.fmean(paid) if paid else None,
        "share": statistics.fmean(shares),
        "share_where_answered": statistics.fmean(answered) if answered else None,
    }


def _rank_row(length: float, losses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shares = sorted(loss["share"] for loss in losses if loss["length"] == length)
    return {
        "length": length,
        "mean": statistics.fmean(shares),
        "tenth": shares[len(shares) // 10],
        "least": shares[0],
    }


ABOUT = (Path(__file__).parent / "texts/search_lengths.md").read_text()


def markdown(document: dict[str, Any]) -> str:
    facts = document["machine"]
    lines = [
        ABOUT,
        f"{document['seeds']} seeds, {facts['date']}, {facts['cpu']}, commit {facts['commit']}.",
        "",
        "| budget, min | ranked at | probes | s per probe | answered | optimum, answered | all |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["searches"]:
        answered = f"{row['answered']} of {row['searches']}"
        seconds = row["seconds_per_probe"] or math.nan
        share = row["share_where_answered"] or math.nan
        lines.append(
            f"| {row['minutes']:g} | {row['way']} | {row['probes']:.1f} | {seconds:.0f}"
            f" | {answered} | {share:.1%} | {row['share']:.1%} |"
        )
    lines += ["", "| lengths | mean | tenth percentile | least |", "|---|---|---|---|"]
    for row in document["ranking"]:
        shares = (row["mean"], row["tenth"], row["least"])
        cells = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {row['length']:g} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
