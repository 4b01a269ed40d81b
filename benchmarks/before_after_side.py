"""One side of the comparison of two checkouts: the same cases, answered by one of them.

`before_after.py` starts it with the python and the PYTHONPATH of a checkout, and writes the cases
to its stdin as JSON. It imports only what both checkouts have. Answers are lines of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

import autotune
from autotune.core.trace import Trace
from autotune.prediction import service as prediction_service

service: Any = prediction_service  # what it imports is replaced here

MODEL = "Qwen2.5-7B"
GPUS = "A100-40G"

Cases = Mapping[str, str]
Answer = Mapping[str, object]


# 1. Command lines.


def command_lines(cases: Cases, folder: Path) -> Iterator[Answer]:
    """Answer command lines with the checkout's own traces and step models; keep the traces."""
    recorder = Recorder(folder, service.open_tracers)
    service.open_tracers = recorder.open
    for name, line in cases.items():
        recorder.begin(name)
        answer = answer_of(line)
        yield {
            "name": name,
            **answer,
            "traces": recorder.traces,
        }
    recorder.close()


def answer_of(line: str) -> Answer:
    """Return exit code, JSON document or text, and CPU seconds of a command line."""
    from autotune.cli import main

    # 1. The command, in this process.
    arguments = shlex.split(line)
    output = io.StringIO()
    errors = io.StringIO()
    streams = sys.stdout, sys.stderr
    began = time.process_time()
    code: object = None
    try:
        sys.stdout = output
        sys.stderr = errors
        main([*arguments, "--json"])
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout, sys.stderr = streams
    seconds = _seconds_since(began)

    # 2. What it printed.
    text = output.getvalue()
    document: object = None
    with contextlib.suppress(ValueError):
        document = json.loads(text)
    if document is None:
        text += errors.getvalue()
    return {
        "exit_code": code,
        "document": document or text,
        "seconds": seconds,
    }


class Recorder:
    """Tracing processes of a whole run: they stay open, and each trace of a case is kept."""

    def __init__(self, folder: Path, make: Any) -> None:
        self._folder = folder
        self._make = make
        self._pools: dict[str, Any] = {}
        self._case = folder
        self.traces = 0

    def begin(self, case: str) -> None:
        self._case = self._folder / case
        self._case.mkdir(parents=True, exist_ok=True)
        self.traces = 0

    def open(self, task: Any, trainer: Any) -> RecordedPool:
        key = f"{task.workload.python} {trainer.name}"
        if key not in self._pools:
            self._pools[key] = self._make(task, trainer)
        return RecordedPool(self, self._pools[key])

    def keep(self, trace: Trace) -> None:
        content = msgspec.json.encode(trace)
        path = self._case / f"{self.traces}.json.z"
        path.write_bytes(zlib.compress(content))
        self.traces += 1

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class RecordedPool:
    """Pool whose traces a recorder keeps, and whose processes serve the next case too."""

    def __init__(self, recorder: Recorder, pool: Any) -> None:
        self._recorder = recorder
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def trace(self, specification: object, **options: Any) -> Trace:
        trace: Trace = self._pool.trace(specification, **options)
        self._recorder.keep(trace)
        return trace

    def close(self) -> None:
        """Stay open."""


# 2. Stored traces.


def stored_traces(cases: Cases, folder: Path) -> Iterator[Answer]:
    """Answer command lines from the trace that is stored for each."""
    if hasattr(service, "open_step_models"):
        service.open_step_models = _no_step_models
    for name, line in cases.items():
        pool = StoredPool(folder / name)
        service.open_tracers = pool.open
        answer = answer_of(line)
        yield {"name": name, **answer}


def _no_step_models(*_: object, **__: object) -> None:
    """Leave each step to its trace."""


class StoredPool:
    """Pool that answers with the one stored trace of a case, whatever step is asked for."""

    traced = 0

    def __init__(self, folder: Path) -> None:
        self._path = folder / "0.json.z"

    def open(self, task: object, trainer: object) -> StoredPool:
        return self

    def expect(self, specifications: object) -> None:
        """Trace nothing ahead."""

    def trace(self, specification: object, **_: object) -> Trace:
        content = zlib.decompress(self._path.read_bytes())
        return msgspec.json.decode(content, type=Trace)

    def close(self) -> None:
        """Nothing is open."""


# 3. Studies, diagnoses, screening.


def studies(cases: Cases, folder: Path) -> Iterator[Answer]:
    """Run whole simulated studies, on the predictions that `folder` holds."""
    import search_predictions
    import search_setups
    import search_studies

    search_predictions.FOLDER = folder
    search_setups.RESULTS = folder
    for name in cases:
        setup, _, seed = name.rpartition(" ")
        began = time.process_time()
        result = search_studies.study(setup, search_studies.OURS, int(seed))
        document = asdict(result)
        document.pop("ask_tell_seconds")
        yield {
            "name": name,
            "document": document,
            "seconds": _seconds_since(began),
        }


def diagnoses(cases: Cases, folder: Path) -> Iterator[Answer]:
    for name, text in cases.items():
        began = time.process_time()
        diagnosis = autotune.diagnose(text.splitlines())
        remedies = [f"{dict(advice.change)}: {advice.why}" for advice in diagnosis.remedies]
        document = {
            "cause": diagnosis.cause,
            "is_memory": diagnosis.is_memory,
            "phase": diagnosis.phase,
            "rank": diagnosis.rank,
            "evidence": diagnosis.evidence,
            "numbers": dict(diagnosis.numbers),
            "remedies": remedies,
        }
        yield {
            "name": name,
            "document": document,
            "seconds": _seconds_since(began),
        }


def screening(cases: Cases, folder: Path) -> Iterator[Answer]:
    """Screen the default space, and yield the CPU seconds of this process."""
    from autotune.request.flags import Flags
    from autotune.request.request_parser import parse_request, possible_candidates
    from autotune.search.loop import legal_candidates

    flags = Flags(model=MODEL, gpus=GPUS, mode="predict")
    parsed = parse_request(flags)
    candidates = possible_candidates(parsed, legal_candidates)
    began = time.process_time()
    predictions = service.predict_candidates(parsed.job, parsed.trainer, candidates)
    seconds = _seconds_since(began)
    for name in cases:
        yield {
            "name": name,
            "document": {"candidates": len(candidates), "predicted": len(predictions)},
            "seconds": seconds,
        }


def _seconds_since(began: float) -> float:
    return round(time.process_time() - began, 3)


KINDS = {
    "lines": command_lines,
    "traces": stored_traces,
    "studies": studies,
    "diagnoses": diagnoses,
    "screening": screening,
}


def main() -> None:
    checkout, kind, folder = sys.argv[1:]
    if not Path(autotune.__file__).is_relative_to(checkout):
        raise SystemExit(f"{autotune.__file__} is not of {checkout}")
    answers = os.fdopen(os.dup(1), "w")
    sys.path.insert(0, f"{checkout}/benchmarks")
    cases = json.load(sys.stdin)
    for answer in KINDS[kind](cases, Path(folder)):
        line = json.dumps(answer, default=str)
        print(line, file=answers, flush=True)


if __name__ == "__main__":
    main()
