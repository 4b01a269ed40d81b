"""How long it takes to predict every candidate of a large space, and how far that is from following each by itself.

    make bench-screening

No GPU, no weights, no network. Each space is screened several times with an empty cache of traces, and once more with one that
this left behind; the seconds that the machine was not given while it ran stand beside each run. Then some candidates are drawn,
and their own step is followed in full: all layers of it, which takes longer than the screening. Says what it is at, and writes
results/screening.json whenever it knows more.
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

from autotune.asking.flags import Flags
from autotune.asking.understanding import Understood, possible_candidates, understand
from autotune.candidate import Candidate
from autotune.environment import SUPPORTED
from autotune.files import put_whole
from autotune.foresight import Foresight
from autotune.inside.processes import descendants
from autotune.predict import swift
from autotune.predict.course import Course
from autotune.predict.pieces import requests
from autotune.prediction import Estimate, Prediction
from autotune.rig.trace_cache import TraceCache
from autotune.rig.tracer import Tracer
from autotune.rig.tracers import Tracers
from autotune.trace import Trace
from autotune.tune import legal_candidates

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
class Followed:
    """When traces were there."""

    ends: list[float] = field(default_factory=list)

    def tracer(self, understood: Understood, cache: TraceCache, versions: Mapping[str, str] | None) -> Tracer:
        trainer, ends = understood.trainer, self.ends

        class Noting(Tracer):
            def trace(self, specification: Mapping[str, object]) -> Trace:
                found = super().trace(specification)
                ends.append(time.monotonic())
                return found

        python, supported = understood.question.job.workload.python, SUPPORTED.get(trainer.name)
        return Noting(python, adapter=trainer.trace_adapter, cache=cache, supported=supported, versions=versions)


@contextlib.contextmanager
def opened(understood: Understood, cache: TraceCache, followed: Followed) -> Iterator[tuple[Foresight, Tracers]]:
    question, trainer = understood.question, understood.trainer
    tracer = Tracers(lambda versions: followed.tracer(understood, cache, versions))
    foresight = Foresight(job=question.job, trainer=trainer, limit_bytes=question.memory_limit_bytes, tracer=tracer)
    with contextlib.closing(foresight):
        yield foresight, tracer


def screened(understood: Understood, candidates: Sequence[Candidate], cache: TraceCache) -> dict[str, Any]:
    """One screening in processes of its own, and what it took."""
    followed = Followed()
    with opened(understood, cache, followed) as (foresight, tracer):
        before, stolen, began = cpu_seconds(), stolen_seconds(), time.monotonic()
        predictions = foresight.screen(candidates)
        ended, spent = time.monotonic(), cpu_seconds() - before
        first = min(followed.ends)
        return {
            "predictions": predictions,
            "seconds_to_first_trace": round(first - began, 2),
            "seconds_after_first_trace": round(ended - first, 2),
            "seconds": round(ended - began, 2),
            "cpu_seconds": round(spent, 2),
            "stolen_seconds": round(stolen_seconds() - stolen, 2),
            "traces_asked": len(followed.ends),
            "traces_made": tracer.traced,
            "families": foresight.families,
            "versions": dict(next(iter(predictions.values())).versions),
        }


def cpu_seconds() -> float:
    """Of this process and of all that live below it now."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(map(_of_process, descendants(os.getpid())))


def _of_process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stolen_seconds() -> float:
    """For which processors were wanted here and given to others on the same host: none where the kernel does not say."""
    try:
        return int(Path("/proc/stat").read_text().splitlines()[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def followed_alone(
    understood: Understood, drawn: Sequence[Candidate], predictions: Mapping[str, Prediction], cache: TraceCache
) -> Iterator[dict[str, Any]]:
    """The screened figures beside those of each candidate's own step; several are followed side by side."""
    with opened(understood, cache, Followed()) as (foresight, tracer):
        tracer.expect(requests.followed(foresight.request(one)) for one in drawn)
        for candidate in drawn:
            yield _row(candidate, predictions[candidate.id], foresight.predict(candidate))


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "candidates": len(rows),
        "largest_deviation": {
            what: max((abs(row[what]) for row in rows if row[what] is not None), default=None)
            for what in ("torch_peak_allocated", "peak_memory", "tokens_per_second")
        },
        "opposite_verdicts": sum({row["screened_fits"], row["followed_fits"]} == {True, False} for row in rows),
        "rows": list(rows),
    }


def _row(candidate: Candidate, seen: Prediction, followed: Prediction) -> dict[str, Any]:
    return {
        "knobs": dict(candidate.knobs),
        "torch_peak_allocated": _off(seen.torch_peak_allocated_bytes, followed.torch_peak_allocated_bytes),
        "peak_memory": _off(seen.peak_memory_bytes, followed.peak_memory_bytes),
        "tokens_per_second": _off(seen.tokens_per_second, followed.tokens_per_second),
        "screened_fits": seen.fits,
        "followed_fits": followed.fits,
    }


def _off(seen: Estimate | None, followed: Estimate | None) -> float | None:
    """How far the screened figure is above (or, negative, below) the followed one, relative to that."""
    return None if seen is None or followed is None else round(seen.value / followed.value - 1, 6)


def case(gpus: str, drawn: int, times: int) -> Iterator[dict[str, Any]]:
    """What is known of one space, more each time."""
    understood = understand(Flags(model=MODEL, gpus=gpus, search=SEARCHED, mode="predict"))
    began = time.monotonic()
    candidates = possible_candidates(understood, legal_candidates)
    listed = time.monotonic() - began
    found: dict[str, Any] = {
        "model": MODEL,
        "gpus": gpus,
        "candidates": len(candidates),
        "seconds_to_list_candidates": round(listed, 2),
    }
    tell(f"{MODEL} on {gpus}: {len(candidates)} candidates, listed in {listed:.1f} s")
    found["cold"] = []
    for number in range(times):
        with tempfile.TemporaryDirectory() as folder:
            cache = TraceCache(Path(folder))
            run = screened(understood, candidates, cache)
            found["cold"].append(told("cold", run))
            yield {**found, "versions": run["versions"]}
            if number == times - 1:
                found["warm"] = told("warm", screened(understood, candidates, cache))
                yield {**found, "versions": run["versions"]}
                chosen = random.Random(SEED).sample(candidates, min(drawn, len(candidates)))
                for rows in _against_following(understood, chosen, run["predictions"], cache):
                    yield {**found, "against_following_each": compared(rows), "versions": run["versions"]}


def told(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """What one screening took, said and to be kept."""
    tell(_run_in_words(name, run))
    return {what: value for what, value in run.items() if what not in ("predictions", "versions")}


def _against_following(
    understood: Understood, drawn: Sequence[Candidate], predictions: Mapping[str, Prediction], cache: TraceCache
) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, one more each time."""
    rows: list[dict[str, Any]] = []
    for row in followed_alone(understood, drawn, predictions, cache):
        rows.append(row)
        tell(f"  followed by itself, {len(rows)} of {len(drawn)}: allocated {row['torch_peak_allocated']:+.4%}")
        yield rows


def compiled() -> float:
    """Seconds until the allocator's model is ready: to compile it after an installation, to load it ever after."""
    began = time.monotonic()
    one, none = np.array([1, -1]), np.array([0])
    course = Course(one, starts=np.array([0, 2]), belongs=none, emptied=none, looked=-1, streams=none, waits=none - 1)
    swift.walk(course, none + 512, 1, None)
    return round(time.monotonic() - began, 2)


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="append", help="a kind of hardware; may be repeated")
    parser.add_argument("--drawn", type=int, default=12, help="candidates of each space that are followed by themselves")
    parser.add_argument("--times", type=int, default=5, help="times that each space is screened with an empty cache")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    here = machine.facts({})  # before anything is written, which would make of any commit a changed one
    ready = compiled()
    tell(f"the allocator's model was ready after {ready} s")
    for gpus in asked.gpus or GPUS:
        known: dict[str, Any] = {}
        for known in case(gpus, asked.drawn, asked.times):
            facts = {**here, "versions": known.pop("versions"), "load_average": os.getloadavg()[0], "seconds_to_compile": ready}
            put_whole(asked.out / "screening.json", _text({**facts, "cases": [*done, known]}))
        done.append(known)
    for one in done:
        if "against_following_each" in one:
            tell(f"{one['gpus']}: against following each: {one['against_following_each']['largest_deviation']}")
    return 0


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _run_in_words(name: str, run: Mapping[str, Any]) -> str:
    return (
        f"  {name}: {run['seconds_to_first_trace']} s to the first trace, {run['seconds_after_first_trace']} s after it, "
        f"{run['cpu_seconds']} CPU seconds, {run['stolen_seconds']} stolen, {run['families']} families, "
        f"{run['traces_made']} traces made"
    )


if __name__ == "__main__":
    raise SystemExit(main())
