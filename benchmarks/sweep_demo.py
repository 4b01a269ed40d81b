"""Sweep of the demo's space, compared with its recommendation.

Measures every legal candidate of the demo's space several times, in rounds, so that a drift of the
machine affects all alike. Then answers the demo's job again for several seeds, and compares each
recommendation with the sweep's best at the same learning knobs.

python benchmarks/sweep_demo.py --model .demo/model --memory-limit 1150M --repeats 3 --seeds 10
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import facts

from autotune.core.answer import Recommendation
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from autotune.search.trial_view import learning_values

PLAN = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=5,
)


def main() -> None:
    arguments = _arguments()
    understood = _question(arguments, seed=0, folder=Path(tempfile.mkdtemp(prefix="sweep-")))
    candidates = legal_candidates(understood.job, understood.trainer)
    if arguments.sweep:
        earlier = json.loads(arguments.sweep.read_text())
        table = {row["id"]: row for row in earlier["candidates"]}
        versions = earlier["machine"]["versions"]
    else:
        table, versions = _sweep(understood, candidates, arguments.repeats)
    runs = [_run(arguments, seed, table) for seed in range(arguments.seeds)]
    result = {
        "about": "the demo's space swept whole, and what the demo recommends for several seeds",
        "machine": facts(versions),
        "model": json.loads((arguments.model / "config.json").read_text()),
        "memory_limit_bytes": understood.job.memory_limit_bytes,
        "repeats": arguments.repeats,
        "timed_cycles": PLAN.timed_cycles,
        "candidates": list(table.values()),
        "runs": runs,
        "within_5_percent": sum(run["share_of_best"] >= 0.95 for run in runs),
        "speedup_over_trl_defaults": _speedup(understood, table, runs),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {
                name: result[name]
                for name in ("machine", "within_5_percent", "speedup_over_trl_defaults")
            },
            indent=1,
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--sweep", type=Path, help="take the sweep from this earlier result and only run the seeds"
    )
    parser.add_argument("--budget", default="4m", help="of each seed's run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo_sweep.json"))
    return parser.parse_args()


def _question(
    arguments: argparse.Namespace,
    *,
    seed: int,
    folder: Path,
) -> ParsedRequest:
    return parse_request(
        Flags(
            model=str(arguments.model),
            gpus="cpu",
            space="demo",
            global_batch=arguments.global_batch,
            memory_limit=arguments.memory_limit,
            budget=arguments.budget,
            seed=seed,
            out=str(folder / f"seed-{seed}"),
        )
    )


def _sweep(
    understood: ParsedRequest,
    candidates: Sequence[Candidate],
    repeats: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Measure every candidate `repeats` times, one round after the other; one load at a time
    inside a round.
    """
    table: dict[str, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    executor = open_executor(understood.job, understood.trainer)
    shuffle = random.Random(0)
    try:
        for repeat in range(repeats):
            # Shuffled anew in each round, loads apart: a machine that warms up or slows down must
            # not favour a place in the row.
            order = sorted(
                shuffle.sample(list(candidates), len(candidates)),
                key=lambda candidate: candidate.load_key,
            )
            for last, candidate in zip([None, *order], order, strict=False):
                if last is None or last.load_key != candidate.load_key:
                    _measure(executor, candidate)  # the first on a fresh process is not counted
                measurement = _measure(executor, candidate)
                versions = dict(measurement.versions) or versions
                row = table.setdefault(candidate.id, _row(understood, candidate))
                _note(row, measurement)
                print(
                    repeat,
                    row["knobs"],
                    row["outcomes"][-1],
                    row["tokens_per_second"][-1:],
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        executor.close()
    return table, versions


def _measure(executor: Executor, candidate: Candidate) -> Measurement:
    return executor.open(candidate).measure(candidate, PLAN)


def _row(understood: ParsedRequest, candidate: Candidate) -> dict[str, Any]:
    knobs = {}
    for name, value in candidate.knobs.items():
        if len(understood.job.space[name].choices) > 1:
            knobs[name] = value
    learning = learning_values(understood.job.space, candidate)
    return {
        "id": candidate.id,
        "knobs": knobs,
        "learning": learning,
        "outcomes": [],
        "tokens_per_second": [],
        "peak_bytes": [],
    }


def _note(row: dict[str, Any], measurement: Measurement) -> None:
    row["outcomes"].append(str(measurement.outcome))
    row["peak_bytes"].append(measurement.memory.peak_bytes)
    if measurement.worst is not None:
        row["tokens_per_second"].append(round(measurement.worst.tokens_per_second, 1))


def _run(
    arguments: argparse.Namespace,
    seed: int,
    table: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The demo itself, with another seed, in a study of its own."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        understood = _question(arguments, seed=seed, folder=Path(folder))
        answer = _answer(understood)
    if answer.winner is None:
        return {"seed": seed, "recommended": None, "share_of_best": 0.0}
    chosen = table[answer.winner.candidate.id]
    rivals = [row for row in table.values() if row["learning"] == chosen["learning"] and _fits(row)]
    best = max(rivals, key=_speed)
    run = {
        "seed": seed,
        "recommended": chosen["knobs"],
        "share_of_best": round(_speed(chosen) / _speed(best), 4),
        "best": best["knobs"],
        "probes": answer.counts.probed,
        "out_of_memory": answer.counts.out_of_memory,
        "loads": answer.counts.loads,
        "seconds": round(answer.elapsed_seconds, 1),
    }
    print(run, file=sys.stderr, flush=True)
    return run


def _answer(understood: ParsedRequest) -> Recommendation:
    job, trainer = understood.job, understood.trainer
    job = replace(job, fresh=True)
    job.out.mkdir(parents=True)
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    executor = open_executor(understood.job, understood.trainer)
    return run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(job.budget_seconds),
    )


def _fits(row: dict[str, Any]) -> bool:
    return bool(row["tokens_per_second"]) and all(outcome == "ok" for outcome in row["outcomes"])


def _speed(row: dict[str, Any]) -> float:
    return statistics.median(row["tokens_per_second"]) if row["tokens_per_second"] else 0.0


def _speedup(
    understood: ParsedRequest,
    table: dict[str, dict[str, Any]],
    runs: list[dict[str, Any]],
) -> float | None:
    """The recommendations' median speed over that of TRL's defaults, both from the sweep; None
    where the defaults did not fit.
    """
    baseline = baseline_candidate(understood.job, understood.trainer)
    row = table.get(baseline.id) if baseline else None
    chosen = [_speed(_row_of(table, run["recommended"])) for run in runs if run["recommended"]]
    if row is None or not _fits(row) or not chosen:
        return None
    return round(statistics.median(chosen) / _speed(row), 3)


def _row_of(table: dict[str, dict[str, Any]], knobs: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in table.values() if row["knobs"] == knobs)


if __name__ == "__main__":
    main()
