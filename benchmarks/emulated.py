"""Predicted memory, compared with that of emulated cards: every setup of emulated_setups.py.

make bench-emulated

No GPU, no weights, no network. The environment has a CUDA build of torch, TRL, and what the setups
need of vLLM, DeepSpeed, bitsandbytes. Each setup runs in the product's own probe worker on emulated
cards (docs/emulated-gpus.md), and is predicted from a trace in the same environment. The two share
the rendering of settings and nothing else. Writes results/emulated.json and results/emulated.md
after each row. What was emulated before is not emulated again, and predicted anew.

Figures of the emulator are emulated, not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_report as report
import machine
from emulated_setups import SETUPS, Setup

from autotune.core.errors import AutotuneError
from autotune.core.measurement import ProbePlan
from autotune.core.plain_data import plain
from autotune.emulator.cards import LONGEST_LAG
from autotune.emulator.reports import RunReport
from autotune.machine import environment
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService
from autotune.prediction.tracer_pool import TracerPool
from autotune.probe.executors import runner_settings
from autotune.probe.executors.emulated import EmulatedExecutor
from autotune.probe.runner import RequestBuilders
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = (
    "torch",
    "vllm",
    "trl",
    "transformers",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "accelerate",
)
PLAN = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=1,
    deadline_seconds=600.0,
)
"""Two cycles: Adam's state is made in the first step, and both hold every phase."""

ENGINE_PLAN = replace(PLAN, optimizer_steps=3, timed_cycles=2)
"""One more: weights are pushed to the engine beside what the second step left, the first with
all state. To a server each push takes buffers of its own: two cycles there, as predicted.
"""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Line = dict[str, Any]


def main() -> int:
    options = _arguments()
    os.environ.update(ENVIRONMENT)
    raw, python, began = Raw(options.raw), environment.interpreter(options.python), time.monotonic()
    earlier = [] if options.earlier is None else json.loads(options.earlier.read_text())["rows"]
    raw.take_over(earlier)
    failed = report.failed_rows(earlier)
    chosen = []
    for setup in SETUPS:
        if not options.names or any(word in setup.name for word in options.names):
            chosen.append(setup)
    versions = {}
    for name, version in environment.versions(python, PACKAGES).items():
        if version:
            versions[name] = version
    facts = machine.facts(versions)
    print(json.dumps(facts), file=sys.stderr)
    rows: dict[str, Line] = {}
    with (
        contextlib.closing(Worker(python)) as worker,
        contextlib.closing(Predictor(python)) as predictor,
    ):
        for setup in sorted(chosen, key=lambda setup: not raw.of(setup)):
            if not options.no_emulation and time.monotonic() - began < options.minutes * 60:
                _emulate(setup, worker, raw, str(facts["commit"]))
            if raw.of(setup):
                rows[setup.name] = report.row(
                    setup, raw.of(setup), _said(setup, predictor.predict(setup))
                )
            elif (
                setup.name in failed
            ):  # it has no figures to take over, and still counts as one that was not run
                rows[setup.name] = failed[setup.name]
            if setup.name in rows:
                facts["seconds"] = round(time.monotonic() - began)
                document = report.document(
                    [rows[setup.name] for setup in chosen if setup.name in rows], facts
                )
                if not options.names:
                    _write(document, options.out)
    print(report.readable(document))
    return 0


def _write(document: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "emulated.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "emulated.md").write_text(report.readable(document))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", required=True, help="interpreter of an environment with a CUDA build of torch"
    )
    parser.add_argument(
        "--raw",
        type=Path,
        required=True,
        help="JSON lines, one for each run: what is there is not run again",
    )
    parser.add_argument(
        "--no-emulation", action="store_true", help="emulate nothing: compare what --raw has"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        help="an earlier emulated.json: what --raw lacks of its rows is not run again",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="emulate nothing new after this time",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "names",
        nargs="*",
        help="only setups whose name contains one of these words, and no table is written",
    )
    return parser.parse_args()


def _emulate(
    setup: Setup,
    worker: Worker,
    raw: Raw,
    commit: str,
) -> None:
    """Emulate what `raw` lacks of a setup."""
    for late in (False, True) if setup.late else (False,):
        if _kind(late) in raw.of(setup):
            continue
        began = time.monotonic()
        line = worker.emulate(setup, late=late)
        seconds = round(time.monotonic() - began, 1)
        raw.add(
            {"setup": setup.name, "kind": _kind(late), "commit": commit, **line, "seconds": seconds}
        )
        _said(setup, line)


def _kind(late: bool) -> str:
    return "late" if late else "emulated"


def _said(setup: Setup, line: Line) -> Line:
    kind = "predicted" if "prediction" in line else "emulated"
    print(f"{setup.name}: {line.get('error', kind)}", file=sys.stderr, flush=True)
    return line


class Raw:
    """Emulated runs by setup and kind, in a file of JSON lines that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )

    def add(self, line: Line) -> None:
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def take_over(self, rows: Sequence[Line]) -> None:
        """Hold the emulated figures of an earlier table where no newer ones are, without writing
        them.
        """
        have = {(line["setup"], line["kind"]) for line in self._lines}
        for row in rows:
            for line in report.lines_of(row):
                if (line["setup"], line["kind"]) not in have:
                    self._lines.append(line)

    def of(self, setup: Setup) -> dict[str, Line]:
        return {line["kind"]: line for line in self._lines if line["setup"] == setup.name}


class Predictor:
    """Predictions of single setups; the tracing processes are shared."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._tracers: TracerPool | None = None

    def predict(self, setup: Setup) -> Line:
        try:
            request = parse_request(
                setup.flags(setup.gpus, str(self._python)).replace(mode="predict")
            )
            candidate = candidate_of_job(request)
            self._tracers = self._tracers or open_tracers(request.job.task, request.trainer)
            service = PredictionService(
                task=request.job.task,
                trainer=request.trainer,
                limit_bytes=request.job.memory_limit_bytes,
                tracer=self._tracers,
            )
            return {
                "prediction": plain(service.predict(candidate)),
                "settings": dict(candidate.settings),
            }
        except AutotuneError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._tracers is not None:
            self._tracers.close()


class Worker:
    """Worker on emulated cards, kept until a setup needs another machine or other imports."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._key: tuple[object, ...] = ()
        self._executor: EmulatedExecutor | None = None
        self._request: ParsedRequest | None = None

    def emulate(self, setup: Setup, *, late: bool) -> Line:
        """Return measurement, settings and the driver's own figures of one setup."""
        try:
            request = self._request = parse_request(
                setup.flags(setup.gpus, str(self._python)).replace(mode="emulate")
            )
            candidate, executor = (
                candidate_of_job(request),
                self._executor_for(setup, request, late=late),
            )
            runner = executor.open(candidate)
            plan = ENGINE_PLAN if "use_vllm=true" in setup.holds and not setup.has_server else PLAN
            measurement: Line = plain(runner.measure(candidate, plan))
            runner.close()
            measurement["memory"].pop("timeline", None)
            figures = _told(executor.take_report())
            return {
                "measurement": measurement,
                "settings": dict(candidate.settings),
                "emulator": figures,
            }
        except AutotuneError as error:
            self.close()
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._key, self._executor = (), None

    def _executor_for(
        self,
        setup: Setup,
        request: ParsedRequest,
        *,
        late: bool,
    ) -> EmulatedExecutor:
        key = (setup.gpus, "use_vllm=true" in setup.holds, late)
        if self._executor is None or key != self._key:
            self.close()
            builders = RequestBuilders(
                load=lambda candidate: self._now.trainer.load_request(
                    candidate, self._now.job.task
                ),
                probe=lambda candidate, plan: self._now.trainer.probe_request(
                    candidate, self._now.job.task, plan
                ),
            )
            self._key, self._executor = (
                key,
                EmulatedExecutor(
                    runner_settings(request.job, request.trainer),
                    builders,
                    hardware=request.job.task.hardware,
                    stride=1,
                    lag=LONGEST_LAG if late else 0,
                    phases=True,
                ),
            )
        return self._executor

    @property
    def _now(self) -> ParsedRequest:
        assert self._request is not None
        return self._request


def _told(run: RunReport) -> Line:
    """Return the emulated driver's own figures: of the process that took most on any card."""
    top = max(
        run.processes, key=lambda process: max(process.peak_bytes.values(), default=0), default=None
    )
    return {
        "peak_bytes": top and max(top.peak_bytes.values(), default=None),
        "phase_peak_bytes": (
            {}
            if top is None
            else {name: max(peaks.values()) for name, peaks in top.phase_peak_bytes.items()}
        ),
        "refused": sum(process.refused for process in run.processes),
        "doubts": run.sentences(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
