"""Repetition of every fault at every place: prints the table and writes it to benchmarks/results.

make test-faults                                              # all of it, most of an hour
python -m tests.faults --seeds 3 --only "probe killed"        # some rows; the other results stay
python -m tests.faults --places ray --missing                 # runs that an interrupted one lacks
python -m tests.faults --places ray --missing --minutes 9
    # as many of them as begin in that time, row by row in turns
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
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
    stored = results.Results(results.FILE if options.keep else None)
    rows = _rows(options, stored)
    faults = tuple(dict.fromkeys(fault for _, fault in rows))
    places = tuple(dict.fromkeys(place for place, _ in rows))
    until = time.monotonic() + 60 * options.minutes
    print(stored.machine_in_words, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        stages(Path(folder), faults, places, options.jobs) as shared,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        for place, fault, seeds in itertools.takewhile(
            lambda _: time.monotonic() < until, _blocks(rows, options, stored)
        ):
            reason = why_not_here(fault, place)
            row = (
                results.left_out(fault, place, reason)
                if reason
                else _row(fault, place, seeds, shared, pool)
            )
            print(results.line(row), flush=True)
            stored.put(row, added=seeds[0] > options.first)
    raise SystemExit(1 if any(row.wrong for row in stored.rows) else 0)


def _rows(options: argparse.Namespace, stored: results.Results) -> list[tuple[ExecutorKind, Fault]]:
    """Return the rows to run, place by place."""
    requested = []
    for place in PLACES:
        for fault in FAULTS:
            if place in options.places and (not options.only or fault.name in options.only):
                requested.append((place, fault))
    missing = []
    for place, fault in requested:
        if not options.missing or stored.runs(fault, place) < _count(fault, place, options):
            missing.append((place, fault))
    return missing


def _blocks(
    rows: list[tuple[ExecutorKind, Fault]],
    options: argparse.Namespace,
    stored: results.Results,
) -> Iterator[tuple[ExecutorKind, Fault, range]]:
    """Yield the seeds of each row: all at once, or in turns where the time is bounded."""
    seeds = {}
    for place, fault in rows:
        done = int(stored.runs(fault, place)) if options.missing else 0
        seeds[place, fault] = range(
            options.first + done, options.first + _count(fault, place, options)
        )
    while seeds:
        for (place, fault), remaining in list(seeds.items()):
            block = (
                remaining
                if options.minutes == float("inf")
                else remaining[: options.jobs if fault.apart else 1]
            )
            yield place, fault, block
            seeds[place, fault] = remaining[len(block) :]
            if not seeds[place, fault]:
                del seeds[place, fault]


def _count(
    fault: Fault,
    place: ExecutorKind,
    options: argparse.Namespace,
) -> int:
    shortened = not options.only and (fault.heavy or place in fault.heavy_on)
    return min(options.seeds, HEAVY_SEEDS) if shortened else int(options.seeds)


def _row(
    fault: Fault,
    place: ExecutorKind,
    seeds: range,
    shared: Stages,
    pool: Executor,
) -> results.Row:
    load = os.getloadavg()[0]
    if fault.apart:
        runs = list(
            pool.map(partial(play_apart, fault.name, place, shared.folder, shared.address), seeds)
        )
    else:
        runs = [play(fault, place, seed, shared) for seed in seeds]
    return results.row_of(fault, place, list(zip(seeds, runs, strict=True)), load)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        help=f"runs of each; {HEAVY_SEEDS} of long ones that --only does not name",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the first seed",
    )
    parser.add_argument(
        "--places",
        type=lambda text: text.split(","),
        default=list(PLACES),
        help="local,ray",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[fault.name for fault in FAULTS],
        metavar="FAULT",
    )
    parser.add_argument(
        "--missing", action="store_true", help="only the runs that the results do not have yet"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no run after this time",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="so many runs beside each other, where they may",
    )
    parser.add_argument(
        "--no-keep",
        dest="keep",
        action="store_false",
        help="write nothing into benchmarks/results",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
