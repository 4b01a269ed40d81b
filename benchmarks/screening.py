"""Screening benchmark: time to predict every candidate of a large space, and the error against a
trace of each.

    make bench-screening

No GPU, no weights, no network. Each space is screened several times with an empty trace cache, and
once with a filled one; the seconds stolen by other guests of the host are recorded with each run.
Then some candidates are drawn and their own steps are traced in all layers, which takes longer than
the screening. Progress is printed, and results/screening.json is written after each result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import numpy as np

from autotune.core.files import write_atomically
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate
from autotune.core.trace import Trace
from autotune.estimate import allocator_compiled
from autotune.estimate.replay_arrays import EventArrays
from autotune.estimate.screening import traced_request
from autotune.machine.environment import SUPPORTED
from autotune.prediction.service import PredictionService
from autotune.prediction.trace_cache import TraceCache
from autotune.prediction.tracer import Tracer
from autotune.prediction.tracer_pool import TracerPool
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request, possible_candidates
from autotune.search.loop import legal_candidates
from autotune.worker.processes import descendants

RESULTS = Path(__file__).resolve().parent / "results"
MODEL = "Qwen2.5-7B"
SEARCHED = (
    "per_device_train_batch_size=1,2,4,8,16,32",
    "max_completion_length=1536,1024,512,256",
    "max_prompt_length=1024,768,512,384,256",
    "num_generations=16,8,4",
)
GPUS = ("A100-40G", "2xA100-40G")
SEED = 3


@dataclass
class TraceTimes:
    """Times at which traces arrived."""

    ends: list[float] = field(default_factory=list)

    def tracer(
        self,
        parsed: ParsedRequest,
        cache: TraceCache,
        versions: Mapping[str, str] | None,
    ) -> Tracer:
        trainer, ends = parsed.trainer, self.ends

        class TimedTracer(Tracer):
            def trace(self, specification: Mapping[str, object]) -> Trace:
                trace = super().trace(specification)
                ends.append(time.monotonic())
                return trace

        python, supported = parsed.job.task.workload.python, SUPPORTED.get(trainer.name)
        return TimedTracer(
            python,
            adapter=trainer.trace_adapter,
            cache=cache,
            supported=supported,
            versions=versions,
        )


@contextlib.contextmanager
def opened(
    parsed: ParsedRequest,
    cache: TraceCache,
    times: TraceTimes,
) -> Iterator[tuple[PredictionService, TracerPool]]:
    job, trainer = parsed.job, parsed.trainer
    tracer = TracerPool(lambda versions: times.tracer(parsed, cache, versions))
    service = PredictionService(
        task=job.task,
        trainer=trainer,
        limit_bytes=job.memory_limit_bytes,
        tracer=tracer,
    )
    with contextlib.closing(service):
        yield service, tracer


def screened(
    parsed: ParsedRequest,
    candidates: Sequence[Candidate],
    cache: TraceCache,
) -> dict[str, Any]:
    """Screen once in new processes; return predictions and costs."""
    times = TraceTimes()
    with opened(parsed, cache, times) as (service, tracer):
        before, stolen, began = cpu_seconds(), stolen_seconds(), time.monotonic()
        predictions = service.screen(candidates)
        ended, spent = time.monotonic(), cpu_seconds() - before
        first = min(times.ends)
        return {
            "predictions": predictions,
            "seconds_to_first_trace": round(first - began, 2),
            "seconds_after_first_trace": round(ended - first, 2),
            "seconds": round(ended - began, 2),
            "cpu_seconds": round(spent, 2),
            "stolen_seconds": round(stolen_seconds() - stolen, 2),
            "traces_asked": len(times.ends),
            "traces_made": tracer.traced,
            "families": service.families,
            "versions": dict(next(iter(predictions.values())).versions),
        }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its present descendants."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime + sum(map(_cpu_seconds_of, descendants(os.getpid())))


def _cpu_seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has exited
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stolen_seconds() -> float:
    """Return the time in which a ready process waited for another guest of the host; 0 if the
    kernel does not report it."""
    try:
        return int(Path("/proc/stat").read_text().splitlines()[0].split()[8]) / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, IndexError):
        return 0.0


def traced_alone(
    parsed: ParsedRequest,
    drawn: Sequence[Candidate],
    predictions: Mapping[str, Prediction],
    cache: TraceCache,
) -> Iterator[dict[str, Any]]:
    """Yield screened figures with those of each candidate's own step; several are traced side by
    side."""
    with opened(parsed, cache, TraceTimes()) as (service, tracer):
        tracer.expect(traced_request(service.request(candidate)) for candidate in drawn)
        for candidate in drawn:
            yield _row(candidate, predictions[candidate.id], service.predict(candidate))


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "candidates": len(rows),
        "largest_deviation": {
            figure: max((abs(row[figure]) for row in rows if row[figure] is not None), default=None)
            for figure in ("torch_peak_allocated", "peak_memory", "tokens_per_second")
        },
        "opposite_verdicts": sum(
            {row["screened_fits"], row["followed_fits"]} == {True, False} for row in rows
        ),
        "rows": list(rows),
    }


def _row(
    candidate: Candidate,
    screened: Prediction,
    traced: Prediction,
) -> dict[str, Any]:
    return {
        "knobs": dict(candidate.knobs),
        "torch_peak_allocated": _off(
            screened.torch_peak_allocated_bytes, traced.torch_peak_allocated_bytes
        ),
        "peak_memory": _off(screened.peak_memory_bytes, traced.peak_memory_bytes),
        "tokens_per_second": _off(screened.tokens_per_second, traced.tokens_per_second),
        "screened_fits": screened.fits,
        "followed_fits": traced.fits,
    }


def _off(screened: Estimate | None, traced: Estimate | None) -> float | None:
    """Return the deviation of the screened figure, relative to the traced one."""
    return (
        None if screened is None or traced is None else round(screened.value / traced.value - 1, 6)
    )


def case(
    gpus: str,
    drawn: int,
    times: int,
) -> Iterator[dict[str, Any]]:
    """Yield the results of one space, more each time."""
    parsed = parse_request(
        Flags(
            model=MODEL,
            gpus=gpus,
            search=SEARCHED,
            mode="predict",
        )
    )
    began = time.monotonic()
    candidates = possible_candidates(parsed, legal_candidates)
    listed = time.monotonic() - began
    document: dict[str, Any] = {
        "model": MODEL,
        "gpus": gpus,
        "candidates": len(candidates),
        "seconds_to_list_candidates": round(listed, 2),
    }
    log(f"{MODEL} on {gpus}: {len(candidates)} candidates, listed in {listed:.1f} s")
    document["cold"] = []
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            cache = TraceCache(Path(folder))
            run = screened(parsed, candidates, cache)
            document["cold"].append(report("cold", run))
            yield {**document, "versions": run["versions"]}
            if number == times - 1:
                document["warm"] = report("warm", screened(parsed, candidates, cache))
                yield {**document, "versions": run["versions"]}
                chosen = random.Random(SEED).sample(candidates, min(drawn, len(candidates)))
                for rows in _compare_with_traces(parsed, chosen, run["predictions"], cache):
                    yield {
                        **document,
                        "against_following_each": compared(rows),
                        "versions": run["versions"],
                    }


def report(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """Print the costs of one screening and return them."""
    log(_describe(name, run))
    figures = {}
    for figure, value in run.items():
        if figure not in ("predictions", "versions"):
            figures[figure] = value
    return figures


def _compare_with_traces(
    parsed: ParsedRequest,
    drawn: Sequence[Candidate],
    predictions: Mapping[str, Prediction],
    cache: TraceCache,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows so far, one more each time."""
    rows: list[dict[str, Any]] = []
    for row in traced_alone(parsed, drawn, predictions, cache):
        rows.append(row)
        log(
            f"  traced alone, {len(rows)} of {len(drawn)}: allocated"
            f" {row['torch_peak_allocated']:+.4%}"
        )
        yield rows


def compiled() -> float:
    """Return the seconds until the allocator replay is ready: compiled after an installation,
    loaded afterwards.
    """
    began = time.monotonic()
    signs, none = np.array([1, -1]), np.array([0])
    arrays = EventArrays(
        signs,
        starts=np.array([0, 2]),
        rows=none,
        emptied=none,
        snapshot=-1,
        streams=none,
        waits=none - 1,
    )
    allocator_compiled.replay_events(arrays, none + 512, 1, None)
    return round(time.monotonic() - began, 2)


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", action="append", help="hardware; may be repeated")
    parser.add_argument(
        "--drawn",
        type=int,
        default=12,
        help="candidates of each space that are traced alone",
    )
    parser.add_argument(
        "--times",
        type=int,
        default=5,
        help="screenings of each space with an empty cache",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    facts_before = machine.facts(
        {}
    )  # before results are written, which would mark the commit as dirty
    ready = compiled()
    log(f"allocator replay ready after {ready} s")
    for gpus in options.gpus or GPUS:
        case_document: dict[str, Any] = {}
        for case_document in case(gpus, options.drawn, options.times):
            facts = {
                **facts_before,
                "versions": case_document.pop("versions"),
                "load_average": os.getloadavg()[0],
                "seconds_to_compile": ready,
            }
            write_atomically(
                options.out / "screening.json", _text({**facts, "cases": [*done, case_document]})
            )
        done.append(case_document)
    for finished in done:
        if "against_following_each" in finished:
            log(
                f"{finished['gpus']}: deviation from own traces:"
                f" {finished['against_following_each']['largest_deviation']}"
            )
    return 0


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _describe(name: str, run: Mapping[str, Any]) -> str:
    return (
        f"  {name}: {run['seconds_to_first_trace']} s to the first trace,"
        f" {run['seconds_after_first_trace']} s after it, {run['cpu_seconds']} CPU seconds,"
        f" {run['stolen_seconds']} stolen, {run['families']} families, {run['traces_made']} traces"
        " made"
    )


if __name__ == "__main__":
    raise SystemExit(main())
