"""Predicted memory, compared with that of emulated cards: every setup of emulated_setups.py.

make bench-emulated

No GPU, no weights, no network. The environment has a CUDA build of torch, TRL, and what the setups
need of vLLM, DeepSpeed, bitsandbytes. Each setup runs in the product's own probe worker on emulated
cards (docs/emulated-gpus.md), and is predicted from a trace in the same environment. The two share
the rendering of settings and nothing else. Writes results/emulated.json and results/emulated.md.

Figures of the emulator are emulated, not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated_report as report
import machine
from emulated_setups import SETUPS, Setup

from autotune.core.answer import plain
from autotune.core.errors import AutotuneError
from autotune.emulator import launch, reports
from autotune.emulator.build import Built, build
from autotune.emulator.cards import LONGEST_LAG, emulated_machine
from autotune.emulator.installation import Installation, look
from autotune.emulator.reports import RunReport
from autotune.machine import environment
from autotune.prediction.service import PredictionService, open_tracers
from autotune.prediction.tracer_pool import TracerPool
from autotune.request.job_builder import candidate_of_job, parse_request

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "vllm", "trl", "transformers", "peft", "bitsandbytes", "deepspeed", "accelerate")
SECONDS = 900.0
"""Wall seconds of one run on emulated cards; beside other work the longest takes a third of it."""

Line = dict[str, Any]


def main() -> int:
    asked = _arguments()
    raw, python, began = Raw(asked.raw), environment.interpreter(asked.python), time.monotonic()
    chosen = [one for one in SETUPS if not asked.names or any(word in one.name for word in asked.names)]
    versions = {name: version for name, version in environment.versions(python, PACKAGES).items() if version}
    facts = machine.facts(versions)
    print(json.dumps(facts), file=sys.stderr)
    if not asked.no_emulation:
        _emulate_all(chosen, python, raw, str(facts["commit"]))
    chosen = [one for one in chosen if raw.of(one)]
    with contextlib.closing(Predictor(python)) as predictor:
        rows = [report.row(one, raw.of(one), _said(one, predictor.predict(one))) for one in chosen]
    facts |= {"seconds": round(time.monotonic() - began)}
    document = report.document(rows, facts)
    print(report.readable(document))
    if not asked.names:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "emulated.json").write_text(json.dumps(document, indent=1) + "\n")
        (asked.out / "emulated.md").write_text(report.readable(document))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with a CUDA build of torch")
    parser.add_argument("--raw", type=Path, required=True, help="JSON lines, one for each run: what is there is not run again")
    parser.add_argument("--no-emulation", action="store_true", help="emulate nothing: compare what --raw has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("names", nargs="*", help="only setups whose name contains one of these words, and no table is written")
    return parser.parse_args()


def _emulate_all(chosen: Sequence[Setup], python: Path, raw: Raw, commit: str) -> None:
    installation = look(python)
    built = build(installation)
    for setup in chosen:
        for late in (False, True) if setup.late else (False,):
            kind = "late" if late else "emulated"
            if kind not in raw.of(setup):
                began = time.monotonic()
                line = emulate(setup, python, installation, built, late=late)
                seconds = round(time.monotonic() - began, 1)
                raw.add({"setup": setup.name, "kind": kind, "commit": commit, **line, "seconds": seconds})
                _said(setup, line)


def _said(setup: Setup, line: Line) -> Line:
    kind = "predicted" if "prediction" in line else "emulated"
    print(f"{setup.name}: {line.get('error', kind)}", file=sys.stderr, flush=True)
    return line


class Raw:
    """Emulated runs by setup and kind, in a file of JSON lines that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def add(self, line: Line) -> None:
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, setup: Setup) -> dict[str, Line]:
        return {line["kind"]: line for line in self._lines if line["setup"] == setup.name}


class Predictor:
    """Predictions of single setups; the tracing processes are shared."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._tracers: TracerPool | None = None

    def predict(self, setup: Setup) -> Line:
        try:
            request = parse_request(setup.flags(setup.gpus, str(self._python)).replace(mode="predict"))
            candidate = candidate_of_job(request)
            self._tracers = self._tracers or open_tracers(request.job.task, request.trainer)
            service = PredictionService(
                task=request.job.task, trainer=request.trainer, limit_bytes=request.job.memory_limit_bytes, tracer=self._tracers
            )
            return {"prediction": plain(service.predict(candidate)), "settings": dict(candidate.settings)}
        except AutotuneError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._tracers is not None:
            self._tracers.close()


def emulate(setup: Setup, python: Path, installation: Installation, built: Built, *, late: bool) -> Line:
    """Run one setup on emulated cards of its own."""
    emulated = emulated_machine(setup.gpus, lag=LONGEST_LAG if late else 0)
    with launch.stand(emulated, installation) as stand, tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-W", "ignore", str(HERE / "emulated_row.py"), setup.name, str(python), str(answer)]
        ours = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as output:
            ended = _within_limit(command, launch.environment(ours, built, stand, phases=True), output)
        found = json.loads(answer.read_text()) if answer.is_file() else {"error": f"{ended}: {log.read_text()[-400:]}"}
        return {**found, "emulator": _told(reports.read(stand.reports, built.stubs))}


def _within_limit(command: list[str], environment: Mapping[str, str], output: Any) -> str:
    """Run a process group, and end all of it at the limit."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return f"exit code {process.wait(SECONDS)}"
    except subprocess.TimeoutExpired:
        return f"ended after {SECONDS:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _told(run: RunReport) -> Line:
    """Return the emulated driver's own figures: of the process that took most on any card."""
    top = max(run.processes, key=lambda process: max(process.peak_bytes.values(), default=0), default=None)
    return {
        "peak_bytes": top and max(top.peak_bytes.values(), default=None),
        "phase_peak_bytes": {} if top is None else {name: max(peaks.values()) for name, peaks in top.phase_peak_bytes.items()},
        "refused": sum(process.refused for process in run.processes),
        "doubts": run.sentences(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
