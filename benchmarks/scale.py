"""Scaling benchmark: probes per minute by slots, CPU time and memory of the driver, and Ray.

make bench-scale

No GPU. Sleeping probes represent probes on GPUs: they use the real driver, study and database, and
the measuring itself sleeps. Real probes run on this machine's CPU, in one slot per core. Writes
results/scale.json and from it results/scale.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import machine
from scale_page import page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the made-up machine of the tests

from autotune.core.events import Event  # noqa: E402
from autotune.core.files import write_atomically  # noqa: E402
from autotune.core.job import Job  # noqa: E402
from autotune.core.measurement import Measurement, Outcome, ProbePlan  # noqa: E402
from autotune.core.space import Candidate, Knob, SearchSpace  # noqa: E402
from autotune.frameworks.base import Trainer  # noqa: E402
from autotune.probe.executors.base import Executor  # noqa: E402
from autotune.search import agenda  # noqa: E402
from autotune.search.agenda import RemainingBudget  # noqa: E402
from autotune.search.loop import (  # noqa: E402
    SHORT_PROBE,
    Clock,
    baseline_candidate,
    legal_candidates,
    run_search,
)
from autotune.search.study import Study, TrialRequest, open_study  # noqa: E402
from tests.inline_executor import InlineExecutor  # noqa: E402
from tests.probe.toys import executor, toy  # noqa: E402
from tests.simulated import MIB, Machine, ToyTrainer, toy_job  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("sleeping", "real", "driver", "memory", "ray")
SLOTS = (1, 2, 4, 8)
PROBE_SECONDS = 1.0
"""Seconds of a sleeping probe. Real ones take longer, so that the driver's share is smaller than
here.
"""


def wide_space(size: int) -> SearchSpace:
    """Return at least this number of neutral candidates, none of which decides another."""
    side = next(number for number in range(2, size) if 2 * number * number >= size)
    knobs = (
        Knob(
            name="batch",
            choices=tuple(range(1, side + 1)),
            effect="neutral",
            memory="unclear",
            says="sequences at once",
        ),
        Knob(
            name="chunk",
            choices=tuple(range(1, side + 1)),
            effect="neutral",
            memory="unclear",
            says="a second number",
        ),
        Knob(
            name="checkpointing",
            choices=(True, False),
            effect="neutral",
            memory="unclear",
            says="recompute",
        ),
        Knob(
            name="use_vllm",
            choices=(False,),
            effect="neutral",
            memory="unclear",
            says="engine",
        ),
        Knob(
            name="num_generations",
            choices=(8,),
            effect="learning",
            memory="grows",
            says="group size",
        ),
        Knob(
            name="max_completion_length",
            choices=(64,),
            effect="learning",
            memory="grows",
            says="longest",
        ),
    )
    return SearchSpace(
        name="wide",
        about="many alike",
        method="grpo",
        framework="trl",
        objective="preference",
        relax=(),
        knobs=knobs,
    )


class WideTrainer(ToyTrainer):
    """Toy trainer with a baseline in the wide space."""

    def baseline(self, space: SearchSpace, task: Any) -> dict[str, Any]:
        return {knob.name: knob.choices[0] for knob in space.knobs}


@dataclass
class Sleeper:
    """Machine that measures by formula after a sleep. Every probe is slightly faster than the one
    before, so that a search never ends."""

    machine: Machine
    seconds: float
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        self.begun.append(time.monotonic())
        if self.seconds:
            time.sleep(self.seconds)
        measurement = self.machine.measure(candidate, plan)
        self.machine.asked.clear()
        self.ended.append(time.monotonic())
        assert measurement.worst is not None
        pace = 1.03 ** -len(self.ended)
        return replace(
            measurement, worst=replace(measurement.worst, cycle_seconds=(pace,) * plan.timed_cycles)
        )


def made_up(
    folder: Path,
    size: int,
    sampler: str,
) -> tuple[Job, WideTrainer, Machine]:
    machine_ = Machine(limit_bytes=10**6 * MIB)
    machine_.speed = lambda candidate: 100.0  # type: ignore[method-assign]
    machine_.need = lambda candidate: 100 * MIB  # type: ignore[method-assign]
    job = replace(
        toy_job(folder, wide_space(size), machine_.limit_bytes, sampler=sampler),
        max_probes=10**9,
        budget_seconds=10**9,
        storage=f"sqlite:///{folder / 'study.db'}",
    )
    return job, WideTrainer(), machine_


def study_of(job: Job, trainer: WideTrainer) -> Study:
    toy = cast(Trainer, trainer)
    return open_study(job, legal_candidates(job, toy), baseline_candidate(job, toy))


def sleeping(slots: int, probes: int) -> dict[str, object]:
    """Probes per minute through the whole driver, from the first probe's start to the last one's
    end.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, trainer, machine_ = made_up(Path(folder), 4 * probes, "random")
        sleeper = Sleeper(machine_, PROBE_SECONDS)
        job = replace(job, max_probes=probes)
        run(job, trainer, InlineExecutor(sleeper.measure, slots=slots))
        short = sleeper.ended[:probes]
        minutes = (max(short) - sleeper.begun[0]) / 60
    rate, ideal = probes / minutes, slots * 60 / PROBE_SECONDS
    return {
        "slots": slots,
        "probes": probes,
        "probes_per_minute": round(rate, 1),
        "of_the_ideal": round(rate / ideal, 3),
    }


def run(
    job: Job,
    trainer: Any,
    search_executor: Executor,
    heard: Callable[[Event], None] = lambda event: None,
) -> Any:
    study = study_of(job, trainer)
    return run_search(
        job,
        study=study,
        executor=search_executor,
        listener=heard,
        clock=Clock(job.budget_seconds),
    )


def driver(
    slots: int,
    trials: int,
    sampler: str,
) -> dict[str, object]:
    """Measure the time of requesting and recording trials alone, with a constant number of pending
    ones.

    No candidate is dropped for being unlikely to be better, so that the search never ends; its
    probability is computed anyway.
    """
    agenda.LEAST_GAIN = 0.0  # type: ignore[attr-defined]
    agenda.TRAINING_SECONDS = math.inf  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        job, trainer, machine_ = made_up(Path(folder), 2 * trials, sampler)
        study = study_of(job, trainer)
        sleeper, pending = Sleeper(machine_, 0.0), list[TrialRequest]()
        seconds: list[float] = []
        measured, database, processor = 0, in_the_database(study), time.process_time()
        while measured < trials:
            began = time.perf_counter()
            while len(pending) < slots:
                trial_request = study.ask(RemainingBudget(seconds=1e9, probes=10**9))
                assert isinstance(trial_request, TrialRequest), trial_request
                pending.append(trial_request)
            oldest = pending.pop(0)
            study.tell(oldest, sleeper.measure(oldest.candidate, SHORT_PROBE))
            measured += 1
            seconds.append(time.perf_counter() - began)
            if measured % 250 == 0:
                so_far = 1000 * (time.process_time() - processor) / measured
                print(
                    f"{sampler}: {measured} of {trials}, {so_far:.1f} ms of the processor each so"
                    " far",
                    file=sys.stderr,
                    flush=True,
                )
        study.leave()
        processor = time.process_time() - processor
    first = sum(seconds[slots : slots + 100]) / 100  # the first turn fills all slots
    return {
        "slots": slots,
        "trials": trials,
        "sampler": sampler,
        "milliseconds_per_probe": round(1000 * sum(seconds) / trials, 2),
        "processor_milliseconds_per_probe": round(1000 * processor / trials, 2),
        "of_these_in_the_database": round(1000 * database() / trials, 2),
        "of_the_first_hundred": round(1000 * first, 2),
        "of_the_last_hundred": round(1000 * sum(seconds[-100:]) / 100, 2),
        "slowest": round(1000 * max(seconds), 1),
    }


def in_the_database(study: Study) -> Callable[[], float]:
    """Count the CPU seconds of database work from here on: Optuna's writes, and the claims."""
    spent, depth = 0.0, 0
    retry = study.retry
    inner = type(retry).__call__

    def call(self: Any, query: Callable[[], Any]) -> Any:
        nonlocal spent, depth
        began, depth = time.process_time(), depth + 1
        try:
            return inner(self, query)
        finally:
            depth -= 1
            spent += 0.0 if depth else time.process_time() - began

    retry.__class__ = type("Timed", (type(retry),), {"__call__": call})
    return lambda: spent


def memory(trials: int) -> dict[str, object]:
    """The driver's resident memory while a study grows."""
    with tempfile.TemporaryDirectory() as folder:
        job, trainer, machine_ = made_up(Path(folder), trials + 500, "random")
        study = study_of(job, trainer)
        sleeper, resident_bytes = Sleeper(machine_, 0.0), dict[int, int]()
        for number in range(1, trials + 1):
            request = study.ask(RemainingBudget(seconds=1e9, probes=10**9))
            assert isinstance(request, TrialRequest)
            study.tell(request, sleeper.measure(request.candidate, SHORT_PROBE))
            if number % (trials // 10) == 0:
                gc.collect()
                resident_bytes[number] = resident()
        study.leave()
    numbers = list(resident_bytes)
    growth = resident_bytes[numbers[-1]] - resident_bytes[numbers[0]]
    per_trial = growth / (numbers[-1] - numbers[0])
    return {
        "trials": trials,
        "resident_mib": {number: round(at / MIB, 1) for number, at in resident_bytes.items()},
        "bytes_per_trial": round(per_trial),
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def real(slots: int, seconds: float) -> dict[str, object]:
    """Real processes under real limits, each of them computing: keepers, ranks, cgroups, meters."""
    from autotune.probe.executors.local_places import available_cores, cpu_places

    with tempfile.TemporaryDirectory() as folder:
        places = cpu_places(slots, 256 * MIB, 2**40, available_cores()) if slots > 1 else None
        chosen = {} if places is None else {"places": places}
        work = tuple({"do": "spin_for", "seconds": 0.5} for _ in range(1))
        with closing(executor(Path(folder), **chosen)) as probing:  # type: ignore[arg-type]
            counts = [0] * slots
            until = time.monotonic() + seconds

            def probe(slot: int) -> None:
                while time.monotonic() < until:
                    candidate = toy(*work)
                    assert (
                        probing.open(candidate, slot)
                        .measure(candidate, ProbePlan(deadline_seconds=30))
                        .outcome
                        is Outcome.OK
                    )
                    counts[slot] += 1

            for slot in range(slots):  # loads are not what is counted
                probing.open(toy(), slot).measure(toy(), ProbePlan(deadline_seconds=30))
            until = time.monotonic() + seconds
            threads = [threading.Thread(target=probe, args=(slot,)) for slot in range(slots)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            minutes = (time.monotonic() - began) / 60
    return {
        "slots": slots,
        "cores": os.cpu_count(),
        "probes_per_minute": round(sum(counts) / minutes, 1),
    }


def on_ray(probes: int) -> dict[str, object]:
    """Measure a two-node cluster: start of its slots, overhead of one probe, and a whole search."""
    from tests.executors.clusters import cluster, ray_executor

    began = time.monotonic()
    with cluster(nodes=2, cpus=2) as ray_cluster, tempfile.TemporaryDirectory() as folder:
        up = time.monotonic() - began
        with closing(ray_executor(ray_cluster.address, Path(folder), slots=2)) as on_cluster:
            began = time.monotonic()
            on_cluster.prepare()
            prepared = time.monotonic() - began
            nothing = toy()
            for slot in (0, 1):
                on_cluster.open(nothing, slot).measure(nothing, ProbePlan(deadline_seconds=30))
            began = time.monotonic()
            for number in range(probes):
                on_cluster.open(nothing, number % 2).measure(
                    nothing, ProbePlan(deadline_seconds=30)
                )
            probe_seconds = (time.monotonic() - began) / probes
    with tempfile.TemporaryDirectory() as folder, closing(executor(Path(folder))) as on_machine:
        on_machine.open(nothing).measure(nothing, ProbePlan(deadline_seconds=30))
        began = time.monotonic()
        for _ in range(probes):
            on_machine.open(nothing).measure(nothing, ProbePlan(deadline_seconds=30))
        local = (time.monotonic() - began) / probes
    return {
        "nodes": 2,
        "seconds_until_the_cluster_is_up": round(up, 1),
        "seconds_until_its_slots_are_there": round(prepared, 1),
        "milliseconds_of_an_empty_probe": round(1000 * probe_seconds, 1),
        "and_without_ray": round(1000 * local, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of everything, written nowhere: to see that it runs",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="some parts; the results of the others stay",
    )
    options = parser.parse_args()
    part = 10 if options.quick else 1
    parts: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
        "sleeping": lambda: (sleeping(slots, max(2, 30 * slots // part)) for slots in SLOTS),
        "real": lambda: (
            real(slots, 20.0 / part) for slots in SLOTS if slots <= (os.cpu_count() or 1)
        ),
        "driver": lambda: (
            driver(64, 2000 // part, sampler) for sampler in ("value", "random", "tpe")
        ),
        "memory": lambda: iter([memory(5000 // part)]),
        "ray": lambda: iter([on_ray(200 // part)]),
    }
    document = stored_results()
    for name in PARTS:
        if name not in options.only:
            continue
        document[name] = ran = {**surroundings(), "rows": []}
        print(name, json.dumps(ran), flush=True)
        for row in parts[name]():
            print(name, json.dumps(row), flush=True)
            ran["rows"].append(row)
            if not options.quick:  # row by row, so that a run that is ended leaves what it has
                write_atomically(
                    RESULTS / "scale.json", (json.dumps(document, indent=1) + "\n").encode()
                )
                write_atomically(RESULTS / "scale.md", page(document).encode())


def stored_results() -> dict[str, Any]:
    """Return the results so far by part, each with its machine."""
    file = RESULTS / "scale.json"
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    surroundings_before = {
        name: before.pop(name) for name in ("machine", "load_average_before") if name in before
    }  # once for all, at first
    results: dict[str, Any] = {}
    for name, part in before.items():
        results[name] = {**surroundings_before, "rows": part} if isinstance(part, list) else part
    return results


def surroundings() -> dict[str, Any]:
    versions = {}
    for name in ("optuna", "sqlalchemy", "numpy", "ray"):
        versions[name] = importlib.metadata.version(name)
    # What else the machine was doing makes every wall-clock figure worse, and the seconds of the
    # processor less so.
    return {
        "machine": machine.facts({"python": platform.python_version(), **versions}),
        "load_average_before": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
