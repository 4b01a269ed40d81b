"""Runs of `make demo` beside whatever else runs, and the gain that there is to find.

python benchmarks/demo_runs.py --model .demo/model --pairs 4
    # CPU seconds per cycle of the candidates without an engine, in turn: what there is to find
python benchmarks/demo_runs.py --model .demo/model --runs 20
    # the demo, until the file holds as many runs: started again, it continues

Each measurement is appended at once to results/demo_runs.jsonl. Then results/demo_runs.md is
written of what the file holds.

CPU seconds of the training processes are what a quiet machine needs with one thread: other work
changes them far less than the time on the clock. They judge the recommendations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from autotune.core.measurement import ProbePlan  # noqa: E402
from autotune.core.space import Candidate  # noqa: E402
from autotune.probe.executors import open_executor  # noqa: E402
from autotune.probe.executors.base import Executor  # noqa: E402
from autotune.request.flags import Flags  # noqa: E402
from autotune.request.request_parser import parse_request  # noqa: E402
from autotune.search.loop import legal_candidates  # noqa: E402
from tests.e2e.demo import demo_flags  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "demo_runs.jsonl"
KNOBS = (
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "use_vllm",
    "vllm_gpu_memory_utilization",
)
BASELINE = (8, True, False, None)
"""TRL's defaults, as values of KNOBS."""

FEW_CYCLES, MANY_CYCLES = 1, 5
FALSE_GAIN = 1.02
"""Gain by CPU seconds below which a recommendation instead of the baseline is a false one."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = _read(arguments.out)
    measured = sum(row["kind"] == "run" for row in rows)
    for _ in range(measured, arguments.runs):
        row = _run_demo(arguments.model.resolve())
        _append(arguments.out, row)
    if arguments.pairs:
        cycles = sum(row["kind"] == "cycle" for row in rows)
        _measure_in_turn(arguments, cycles)
    arguments.out.with_suffix(".md").write_text(markdown(_read(arguments.out)))


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


# 1. The demo.


def _run_demo(model: Path) -> Row:
    """Return what one run of the demo answered."""
    command = [sys.executable, "-m", "autotune", "run", "--model", str(model), *demo_flags()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        environment["XDG_DATA_HOME"] = folder  # nothing is known of earlier runs
        done = subprocess.run(
            [*command, "--out", "out", "--fresh"],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
        )
        file = Path(folder, "out", "recommendation.json")
        row: Row = {"kind": "run", "exit_code": done.returncode}
        row["load_average"] = [round(load, 1), round(os.getloadavg()[0], 1)]
        if not file.exists():
            return row
        document = json.loads(file.read_text())
    knobs = document["recommendation"]["knobs"]
    return {
        **row,
        "seconds": document["elapsed_seconds"],
        "probes": document["counts"]["probed"],
        "out_of_memory": document["counts"]["out_of_memory"],
        "proven": document["proven"],
        "recommended": {name: knobs.get(name) for name in KNOBS},
        "advantage": document["advantage"],
    }


# 2. What there is to find.


def _measure_in_turn(arguments: argparse.Namespace, measured: int) -> None:
    """Measure the candidates forwards and backwards, as often as there are pairs. `measured`:
    cycles that the file holds.
    """
    flags = dict(zip(demo_flags()[::2], demo_flags()[1::2], strict=True))
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        request = parse_request(
            Flags(
                model=str(arguments.model),
                gpus="cpu",
                space="demo",
                global_batch=int(flags["--global-batch"]),
                memory_limit="6G",
                hold=("use_vllm=false", "max_completion_length=8"),
                mode="probe",
                out=folder,
            )
        )
        candidates = legal_candidates(request.job, request.trainer)
        executor = open_executor(request.job, request.trainer)
        try:
            _cpu_seconds(executor, candidates[0], FEW_CYCLES)  # the load is not counted
            for _ in range(measured // (2 * len(candidates)), arguments.pairs):
                for candidate in [*candidates, *reversed(candidates)]:
                    _append(arguments.out, _cycle(executor, candidate))
        finally:
            executor.close()


def _cycle(executor: Executor, candidate: Candidate) -> Row:
    """Return CPU seconds of one cycle: a longer probe minus a shorter one."""
    few, _ = _cpu_seconds(executor, candidate, FEW_CYCLES)
    many, peak_bytes = _cpu_seconds(executor, candidate, MANY_CYCLES)
    return {
        "kind": "cycle",
        "knobs": {name: candidate.knobs.get(name) for name in KNOBS},
        "cpu_seconds": round((many - few) / (MANY_CYCLES - FEW_CYCLES), 4),
        "peak_bytes": peak_bytes,
        "load_average": round(os.getloadavg()[0], 1),
    }


def _cpu_seconds(
    executor: Executor,
    candidate: Candidate,
    cycles: int,
) -> tuple[float, int | None]:
    plan = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=cycles)
    before = _cpu_seconds_of_children()
    measurement = executor.open(candidate).measure(candidate, plan)
    return _cpu_seconds_of_children() - before, measurement.memory.peak_bytes


def _cpu_seconds_of_children() -> float:
    """Return CPU seconds of the worker, its ranks, and ended ranks."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


# 3. Summary.


def markdown(rows: Sequence[Row]) -> str:
    """Return the page: the gain of each candidate, and what the runs found of it."""
    seconds_by_knobs: dict[tuple[Any, ...], list[float]] = {}
    runs = []
    for row in rows:
        if row["kind"] == "run":
            runs.append(row)
        else:
            seconds = seconds_by_knobs.setdefault(_values(row["knobs"]), [])
            seconds.append(row["cpu_seconds"])
    gains = _gains(seconds_by_knobs)
    lines = [
        "# Twenty runs of the demo beside other work",
        "",
        "`make bench-demo`. CPU seconds of one cycle, median of the measurements in turn; gain",
        "over TRL's defaults, which are the demo's baseline.",
        "",
        "| micro-batch | recomputation | CPU s | measurements | gain |",
        "|---|---|---|---|---|",
    ]
    for values, seconds in seconds_by_knobs.items():
        batch, recomputation, *_ = values
        lines.append(
            f"| {batch} | {'yes' if recomputation else 'no'} | {statistics.median(seconds):.3f}"
            f" | {len(seconds)} | {gains.get(values, 1.0):.2f} |"
        )
    lines += ["", _verdict(runs, gains), "", *_table(runs, gains)]
    return "\n".join(lines) + "\n"


def _values(knobs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(knobs.get(name) for name in KNOBS)


def _gains(seconds_by_knobs: Mapping[tuple[Any, ...], Sequence[float]]) -> dict[Any, float]:
    if BASELINE not in seconds_by_knobs:
        return {}
    baseline_seconds = statistics.median(seconds_by_knobs[BASELINE])
    gains = {}
    for values, seconds in seconds_by_knobs.items():
        gains[values] = baseline_seconds / statistics.median(seconds)
    return gains


def _verdict(runs: Sequence[Row], gains: Mapping[Any, float]) -> str:
    true_gains = false_gains = engines = 0
    for row in runs:
        values = _values(row.get("recommended") or {})
        if values == BASELINE or "recommended" not in row:
            continue
        if values not in gains:
            engines += 1
        elif gains[values] >= FALSE_GAIN:
            true_gains += 1
        else:
            false_gains += 1
    return (
        f"{len(runs)} runs: a gain was found in {true_gains}, a false one in {false_gains};"
        f" {engines}"
        " recommend a candidate with an engine, which is not among the measurements in turn."
    )


def _table(runs: Sequence[Row], gains: Mapping[Any, float]) -> list[str]:
    lines = [
        "| load before, after | seconds | probes | recommended | by CPU seconds | demo's gain |",
        "|---|---|---|---|---|---|",
    ]
    for row in runs:
        if "recommended" not in row:
            lines.append(f"| {row['load_average']} | exit code {row['exit_code']} | | | | |")
            continue
        values = _values(row["recommended"])
        gain = gains.get(values)
        advantage = row["advantage"] or {}
        lines.append(
            f"| {row['load_average']} | {row['seconds']:.0f} | {row['probes']} | {values[:3]}"
            f" | {'-' if gain is None else f'{gain:.2f}'} | {advantage.get('says', '-')} |"
        )
    return lines


if __name__ == "__main__":
    main()
