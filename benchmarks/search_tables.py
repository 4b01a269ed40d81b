"""Tables of measured candidates: every legal one of a space, three times, under a limit that some
exceed.

python benchmarks/search_tables.py --table narrow-transformers --model FOLDER --raw FOLDER
    # one round; again for more
    python benchmarks/search_tables.py --table narrow-transformers --model FOLDER --raw FOLDER
    --assemble

A round measures all candidates once in a new random order, one load after the other, and appends
each measurement to a file: an interrupted round continues. The load average of each measurement
shows other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from machine import facts

from autotune.core.measurement import Measurement
from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from autotune.search.loop import SHORT_PROBE, legal_candidates

HERE = Path(__file__).resolve().parent
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Table:
    """Constant settings of one table."""

    space: str
    """A file of benchmarks/spaces."""

    limit: str
    shape: str
    """Arguments of autotune/worker/synthetic.py that make the model."""


NARROW = "--hidden 128 --intermediate 768 --layers 2 --vocab 1024"
WIDE = "--hidden 128 --intermediate 512 --layers 2 --vocab 8192"

TABLES = {
    "narrow-transformers": Table(
        space="rollout-by-transformers",
        limit="720M",
        shape=NARROW,
    ),
    "wide-transformers": Table(
        space="rollout-by-transformers",
        limit="980M",
        shape=WIDE,
    ),
    "narrow-vllm": Table(
        space="rollout-by-vllm",
        limit="1200M",
        shape=NARROW,
    ),
    "wide-vllm": Table(
        space="rollout-by-vllm",
        limit="1300M",
        shape=WIDE,
    ),
}


def main() -> None:
    arguments = _arguments()
    raw = arguments.raw / f"{arguments.table}.jsonl"
    raw.parent.mkdir(parents=True, exist_ok=True)
    if arguments.assemble:
        _assemble(arguments, raw)
    else:
        _one_round(arguments, raw)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=sorted(TABLES), required=True)
    parser.add_argument(
        "--model", type=Path, help="a folder that synthetic.py made with the table's shape"
    )
    parser.add_argument(
        "--raw",
        type=Path,
        required=True,
        help="where measurements are collected",
    )
    parser.add_argument(
        "--assemble",
        action="store_true",
        help="write benchmarks/results/search/table_*.json from what was collected",
    )
    parser.add_argument("--first", type=int, help="only so many candidates, to try a limit")
    return parser.parse_args()


def _one_round(arguments: argparse.Namespace, raw: Path) -> None:
    """The first round that is not whole yet."""
    understood = job_of(TABLES[arguments.table], str(arguments.model))
    candidates = legal_candidates(understood.job, understood.trainer)[: arguments.first]
    done = _collected(raw)
    number = min(
        (sum(row["id"] == candidate.id for row in done) for candidate in candidates), default=0
    )
    if number >= ROUNDS:
        print("all rounds are there", file=sys.stderr)
        return
    measured_ids = {row["id"] for row in done if row["round"] == number}
    order = _order(
        [candidate for candidate in candidates if candidate.id not in measured_ids], number
    )
    _measure_all(understood, order, number, raw)


def job_of(table: Table, model: str) -> ParsedRequest:
    space = HERE / "spaces" / f"{table.space}.yaml"
    out = tempfile.mkdtemp(prefix="table-")
    return parse_request(
        Flags(
            model=model,
            gpus="cpu",
            space=str(space),
            memory_limit=table.limit,
            out=out,
        )
    )


def _order(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """Return loads in one random order, candidates of a load in another: no position is favoured
    over the rounds.
    """
    shuffle = random.Random(number)
    loads = sorted({candidate.load_key for candidate in candidates})
    shuffle.shuffle(loads)
    return sorted(
        shuffle.sample(list(candidates), len(candidates)),
        key=lambda candidate: loads.index(candidate.load_key),
    )


def _measure_all(
    understood: ParsedRequest,
    order: Sequence[Candidate],
    number: int,
    raw: Path,
) -> None:
    executor = open_executor(understood.job, understood.trainer)
    last = None
    try:
        with raw.open("a") as file:
            for candidate in order:
                if candidate.load_key != last:
                    executor.open(candidate).measure(
                        candidate, SHORT_PROBE
                    )  # the first in a fresh process is not counted
                last = candidate.load_key
                load_average = os.getloadavg()[0]
                row = _row(
                    candidate,
                    number,
                    executor.open(candidate).measure(candidate, SHORT_PROBE),
                    load_average,
                )
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    number,
                    row["outcome"],
                    row["knobs"],
                    row["peak_bytes"],
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        executor.close()


def _row(
    candidate: Candidate,
    number: int,
    measured: Measurement,
    load_average: float,
) -> dict[str, Any]:
    speed, failure = measured.worst, measured.failure
    return {
        "id": candidate.id,
        "knobs": dict(candidate.knobs),
        "round": number,
        "outcome": str(measured.outcome),
        "peak_bytes": measured.memory.peak_bytes,
        "phase_peak_bytes": dict(measured.memory.phase_peak_bytes),
        "bound_by": measured.memory.bound_by,
        "cost": {
            name: round(value, 4)
            for name, value in msgspec.to_builtins(measured.cost).items()
            if value is not None
        },
        "speed": None if speed is None else msgspec.to_builtins(speed),
        "failure": None if failure is None else {**msgspec.to_builtins(failure), "excerpt": ""},
        "versions": dict(measured.versions),
        "load_average": round(load_average, 2),
    }


def _collected(raw: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []


def _assemble(arguments: argparse.Namespace, raw: Path) -> None:
    """Write one file: the common settings, and every measurement once."""
    name, rows = arguments.table, _collected(raw)
    table = TABLES[name]
    versions = next(row["versions"] for row in rows if row["versions"])
    result = {
        "about": (
            f"every legal candidate of benchmarks/spaces/{table.space}.yaml, measured {ROUNDS}"
            " times on a CPU"
        ),
        "machine": facts(versions),
        "space": table.space,
        "global_batch": 16,
        "model_shape": table.shape,
        "model_config": json.loads((arguments.model / "config.json").read_text()),
        "limit": table.limit,
        "plan": msgspec.to_builtins(SHORT_PROBE),
        "jobs_beside": (
            "yes: other jobs ran on the same cores; load_average is the machine's over the last"
            " minute"
        ),
        "bound_by": sorted({row["bound_by"] for row in rows}),
        "rows": [_compact(row) for row in rows],
    }
    out = HERE / "results" / "search" / f"table_{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    head, body = {key: value for key, value in result.items() if key != "rows"}, result["rows"]
    lines = ",\n".join(json.dumps(row) for row in body)
    out.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n")


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("versions", "bound_by")}


if __name__ == "__main__":
    main()
