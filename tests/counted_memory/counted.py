"""The same steps twice: traced on fake tensors and counted on real ones.

    python -m tests.counted_memory.counted ALLOCATOR.so < SPECIFICATIONS.json
        one line of JSON for each, on stdout

The framework is imported once; each step, traced or real, runs in a process forked from that.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.worker.tracing.annotators import NullAnnotator
from autotune.worker.trl import step_trace
from tests.counted_memory import varlen
from tests.counted_memory.phases import PHASES


def traced(specification: dict[str, Any]) -> dict[str, Any]:
    """Peaks of the trace, over all and by phase."""
    trace = step_trace.trace(specification)
    peaks: dict[str, int] = {}
    marks, live, peak, upcoming = trace["marks"], 0, 0, 0
    phase = "load"
    for index, event in enumerate(trace["events"]):
        while upcoming < len(marks) and marks[upcoming]["event"] <= index:
            phase = marks[upcoming]["phase"]
            peaks[phase] = max(live, peaks.get(phase, 0))
            upcoming += 1
        live += trace["sizes"][event - 1] if event > 0 else -trace["sizes"][-event - 1]
        peaks[phase] = max(live, peaks.get(phase, 0))
        peak = max(peak, live)
    return {
        "peak": peak,
        "phases": {name: peaks[name] for name in PHASES if name in peaks},
        "seconds": trace["seconds"],
    }


class Counter(NullAnnotator):
    """Annotator that reads the allocator's peak at each change of phase."""

    def __init__(self, counting: Any, base: int) -> None:
        self._counting, self._base = counting, base
        self.phase = "load"
        self.peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        self.turn()
        self.phase = phase

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def turn(self) -> None:
        peak = self._counting.peak() - self._base
        self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
        self._counting.reset_peak()


def counted(specification: dict[str, Any], library: Path) -> dict[str, Any]:
    """Peaks of the real run."""
    from tests.counted_memory import counting

    gc.collect()
    allocator = counting.install(library)
    counter = Counter(allocator, allocator.live())

    def loaded(trainer: Any) -> None:
        gc.collect()
        allocator.reset_peak()  # the initialisation of a model is not part of its training

    step_trace.run(specification, counter, loaded)
    counter.turn()
    return {
        "peak": max(counter.peaks.values()),
        "phases": {name: counter.peaks[name] for name in PHASES if name in counter.peaks},
    }


def in_fork(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run the work in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = work(*arguments)
        except BaseException:
            answer = {"error": traceback.format_exc()[-3000:]}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return {"error": "the process ended without an answer"}
    answer = json.loads(text)
    assert isinstance(answer, dict)
    return answer


def main() -> None:
    library = Path(sys.argv[1])
    specifications = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # frameworks print to stdout
        step_trace.warm({"model": {"config": {"model_type": "qwen2"}}})
        varlen.install()
        gc.freeze()
        for specification in specifications:
            answer = {
                "traced": in_fork(traced, specification),
                "counted": in_fork(counted, specification, library),
            }
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
