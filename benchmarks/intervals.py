"""Intervals of a probe and of its confirmation: `python benchmarks/intervals.py`.

A study probes eight candidates of the demo's model as a search does, and confirms all eight
afterwards, in another order. Two measurements of one candidate are a pair. A search confirms only a
few candidates, so the spread is learned here from as few: the pair itself and two other candidates
with their confirmations, the remaining ones with their probes alone.

Every study is appended to benchmarks/results/intervals.json; a call goes on where the last one
ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from machine import facts  # noqa: E402

from autotune.core.measurement import ProbePlan, Speed  # noqa: E402
from autotune.core.run_statistics import RunSpread, learn_run_spread  # noqa: E402
from autotune.core.space import Candidate  # noqa: E402
from autotune.probe.executors import open_executor  # noqa: E402
from autotune.probe.executors.base import Executor  # noqa: E402
from autotune.request.flags import Flags  # noqa: E402
from autotune.request.job_builder import ParsedRequest  # noqa: E402
from autotune.request.request_parser import parse_request  # noqa: E402
from autotune.search.loop import LONG_PROBE, SHORT_PROBE, legal_candidates  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "intervals.json"
PAIRS_PER_STUDY = 8
COMPLETION_LENGTHS = "64,32"
CONFIRMED = 3
"""Candidates whose confirmations a search knows: its finalists (search/confirmation.py)."""

Pair = tuple[Speed, Speed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "model")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no further study after this time",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the stored studies")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    stored = (
        json.loads(arguments.out.read_text())
        if arguments.out.exists() and not arguments.fresh
        else {"studies": []}
    )
    with tempfile.TemporaryDirectory(prefix="intervals-") as folder:
        request = _request(arguments.model, Path(folder))
        executor = open_executor(request.job, request.trainer)
        try:
            _measure_pairs(request, executor, stored, arguments)
        finally:
            executor.close()


def _measure_pairs(
    request: ParsedRequest,
    executor: Executor,
    stored: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    """Measure studies until there are enough pairs, and store each of them."""
    began = time.monotonic()
    candidates = legal_candidates(request.job, request.trainer)
    versions = (
        executor.open(candidates[0]).measure(candidates[0], ProbePlan(timed_cycles=1)).versions
    )
    while (
        sum(len(study["pairs"]) for study in stored["studies"]) < arguments.pairs
        and time.monotonic() - began < arguments.seconds
    ):
        studies = [
            *stored["studies"],
            measured_study(executor, candidates, seed=len(stored["studies"])),
        ]
        learned = {"probes alone": 0, "finalists": CONFIRMED}
        stored = {
            "about": (
                "two measurements of one candidate, probe and confirmation: do their 95 % intervals"
                " overlap?"
            ),
            "machine": facts(versions),
            "load_average": [
                min(study["load_average"][0] for study in studies),
                max(study["load_average"][1] for study in studies),
            ],
            "result": {
                name: summary(studies, confirmed=number) for name, number in learned.items()
            },
            "studies": studies,
        }
        arguments.out.write_text(
            json.dumps(stored, indent=None).replace('{"seed"', '\n{"seed"') + "\n"
        )
        print(len(studies), studies[-1]["load_average"], json.dumps(stored["result"]), flush=True)


def measured_study(
    executor: Executor,
    candidates: Sequence[Candidate],
    *,
    seed: int,
) -> dict[str, Any]:
    """Probe and confirm candidates of one load, and return the study's record."""
    chance = random.Random(seed)
    chosen = chance.sample(candidates, PAIRS_PER_STUDY)
    loads = [os.getloadavg()[0]]
    probes = {candidate.id: _speed(executor, candidate, SHORT_PROBE) for candidate in chosen}
    loads.append(os.getloadavg()[0])
    again = {}
    for candidate in chance.sample(chosen, len(chosen)):
        again[candidate.id] = _speed(executor, candidate, LONG_PROBE)
    loads.append(os.getloadavg()[0])
    pairs = [[_record(probes[candidate.id]), _record(again[candidate.id])] for candidate in chosen]
    return {
        "seed": seed,
        "load_average": [round(min(loads), 1), round(max(loads), 1)],
        "pairs": pairs,
    }


def _request(model: Path, folder: Path) -> ParsedRequest:
    """The demo without vLLM, whose loads would take most of the time, and with short
    completions, for the same reason: decoding them one token at a time is most of a cycle.
    """
    return parse_request(
        Flags(
            model=str(model),
            gpus="cpu",
            space="demo",
            memory_limit="2G",
            hold=("use_vllm=false",),
            mode="probe",
            search=(f"max_completion_length={COMPLETION_LENGTHS}",),
            out=str(folder / "out"),
        )
    )


def _speed(
    executor: Executor,
    candidate: Candidate,
    plan: ProbePlan,
) -> Speed:
    measurement = executor.open(candidate).measure(candidate, plan)
    if measurement.ranking_speed is None:
        raise SystemExit(f"A probe has no speed: {measurement.outcome}, {measurement.failure}")
    return measurement.ranking_speed


def _record(speed: Speed) -> dict[str, Any]:
    return {
        "seconds": [round(seconds, 5) for seconds in speed.cycle_seconds],
        "tokens": speed.cycle_loss_tokens,
    }


def speed_of(record: Mapping[str, Any]) -> Speed:
    """Return the speed of a stored measurement."""
    return Speed(
        completion_tokens=0,
        cycle_seconds=tuple(record["seconds"]),
        cycle_loss_tokens=tuple(record["tokens"]),
        prompt_tokens=0,
        phase_seconds={},
    )


def spreads(study: Mapping[str, Any], *, confirmed: int) -> Iterator[tuple[Pair, RunSpread]]:
    """Yield each pair with the spread that a search would have learned that confirmed this
    candidate and the next ones, `confirmed` together.
    """
    pairs: list[Pair] = []
    for probe, confirmation in study["pairs"]:
        pairs.append((speed_of(probe), speed_of(confirmation)))
    for place, pair in enumerate(pairs):
        runs: list[Sequence[Speed]] = [speeds[:1] for speeds in pairs]
        for step in range(place, place + confirmed):
            runs[step % len(pairs)] = pairs[step % len(pairs)]
        yield pair, learn_run_spread(runs)


def overlap(
    spread: RunSpread,
    first: Speed,
    second: Speed,
) -> bool:
    """Return True if the 95 % intervals of two speeds overlap: each from its speed / factor to
    its speed x factor.
    """
    slow, fast = sorted((first, second), key=lambda speed: speed.tokens_per_second)
    low, high = (
        fast.tokens_per_second / (1 + spread.half_width(fast)),
        slow.tokens_per_second * (1 + spread.half_width(slow)),
    )
    return low <= high


def summary(studies: Sequence[Mapping[str, Any]], *, confirmed: int) -> dict[str, Any]:
    """Return the share of pairs whose intervals overlap, and the intervals' width."""
    pairs: list[tuple[Pair, RunSpread]] = []
    for study in studies:
        pairs.extend(spreads(study, confirmed=confirmed))
    widths = [spread.half_width(probe) for (probe, _), spread in pairs]
    return {
        "pairs": len(pairs),
        "overlapping": sum(overlap(spread, *pair) for pair, spread in pairs),
        "median_half_width": round(statistics.median(widths), 4),
        "largest_half_width": round(max(widths), 4),
    }


if __name__ == "__main__":
    main()
