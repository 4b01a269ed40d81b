"""Repetition of every fault at every place: prints the table and writes it to benchmarks/results.

make test-faults                                              # all of it, most of an hour
python -m tests.faults --seeds 3 --only "probe killed"        # some rows; the other results stay
python -m tests.faults --places ray --missing                 # rows that an interrupted run lacks
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.faults import results
from tests.faults.play import Stages, play, play_apart, stages
from tests.faults.table import FAULTS, PLACES, ExecutorKind, Fault, why_not_here

SEEDS, HEAVY_SEEDS = 20, 5


def main() -> None:
    options = _options()
    kept = results.Results(results.FILE if options.keep else None)
    rows = _rows(options, kept)
    faults = tuple(dict.fromkeys(fault for _, fault in rows))
    places = tuple(dict.fromkeys(place for place, _ in rows))
    print(kept.machine_in_words, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        stages(Path(folder), faults, places) as shared,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        for place, fault in rows:
            reason = why_not_here(fault, place)
            row = results.left_out(fault, place, reason) if reason else _row(fault, place, options, shared, pool)
            print(results.line(row), flush=True)
            kept.put(row)
    raise SystemExit(1 if any(row.wrong for row in kept.rows) else 0)


def _rows(options: argparse.Namespace, kept: results.Results) -> list[tuple[ExecutorKind, Fault]]:
    """Return the rows to run, place by place."""
    asked = [
        (place, fault)
        for place in PLACES
        for fault in FAULTS
        if place in options.places and (not options.only or fault.name in options.only)
    ]
    return [
        (place, fault)
        for place, fault in asked
        if not (options.missing and kept.has(fault, place, _count(fault, place, options)))
    ]


def _count(fault: Fault, place: ExecutorKind, options: argparse.Namespace) -> int:
    shortened = not options.only and (fault.heavy or place in fault.heavy_on)
    return min(options.seeds, HEAVY_SEEDS) if shortened else int(options.seeds)


def _row(fault: Fault, place: ExecutorKind, options: argparse.Namespace, shared: Stages, pool: Executor) -> results.Row:
    """Runs go beside each other only where they share nothing that one of them harms."""
    seeds, load = range(options.first, options.first + _count(fault, place, options)), os.getloadavg()[0]
    if place == "local" and fault.database == "sqlite" and not fault.heavy:
        runs = list(pool.map(partial(play_apart, fault.name, shared.folder), seeds))
    else:
        runs = [play(fault, place, seed, shared) for seed in seeds]
    return results.row_of(fault, place, list(zip(seeds, runs, strict=True)), load)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"runs of each; {HEAVY_SEEDS} of long ones that --only does not name"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(PLACES), help="local,ray")
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="FAULT")
    parser.add_argument("--missing", action="store_true", help="only rows of which the results do not have as many runs yet")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="so many runs beside each other, where they may")
    parser.add_argument("--no-keep", dest="keep", action="store_false", help="write nothing into benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
