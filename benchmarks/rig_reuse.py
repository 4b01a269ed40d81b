"""Benchmark of runner reuse: the same search with runners that stay loaded, and with one process
per candidate.

First `autotune run`'s own search runs. Then exactly the same probes, in the same order and with the
same plans, are repeated by an executor that starts a new interpreter for each one. The result is
the device seconds until the recommendation, in one run on one machine.

python benchmarks/rig_reuse.py
    # a tiny synthetic model with real vLLM, on the CPU
    python benchmarks/rig_reuse.py --model Qwen2.5-0.5B --gpus local --memory-limit 16G
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from machine import facts

from autotune.core.answer import Recommendation
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor, ProbeRunner, Slot
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study

MADE_UP = Path(__file__).resolve().parents[1] / "autotune" / "worker" / "synthetic.py"

CPU_HOLDS = ("use_vllm=true", "vllm_gpu_memory_utilization=0.5")
CPU_SEARCH = (
    "per_device_train_batch_size=1,2,4,8,16",
    "gradient_accumulation_steps=1,2,4,8,16",
    "gradient_checkpointing=true,false",
)
GPU_HOLDS = ("use_vllm=true", "vllm_gpu_memory_utilization=0.3")


@dataclass
class Probe:
    """Measurement that the search made."""

    candidate: Candidate
    plan: ProbePlan
    measurement: Measurement


@dataclass
class Recorded:
    """Executor whose runners record each request and its result."""

    inner: Executor
    probes: list[Probe] = field(default_factory=list)

    def prepare(self) -> Mapping[str, str]:
        return self.inner.prepare()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.inner.slots[:1]

    def open(self, candidate: Candidate, slot: int = 0) -> ProbeRunner:
        return RecordedRig(self.inner.open(candidate, slot), self.probes)

    @property
    def loads(self) -> int:
        return self.inner.loads

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()


@dataclass
class RecordedRig:
    """Runner of a recording executor."""

    inner: ProbeRunner
    probes: list[Probe]

    def __post_init__(self) -> None:
        self.load_key = self.inner.load_key

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = self.inner.measure(candidate, plan)
        self.probes.append(Probe(candidate, plan, measurement))
        return measurement

    def close(self) -> None:
        self.inner.close()


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="rig-reuse-") as folder:
        understood = _question(arguments, Path(folder))
        _warm_the_disk(understood)
        recorded = Recorded(open_executor(understood.job, understood.trainer))
        answer = _search(understood, recorded)
        apart = _one_process_each(understood, recorded.probes)
    result = _result(arguments, understood, answer, recorded.probes, apart)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in ("seconds", "ratio", "further_candidate_seconds")},
            indent=1,
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a tiny made-up one otherwise")
    parser.add_argument("--gpus", default="cpu")
    parser.add_argument("--memory-limit", default="2G")
    parser.add_argument(
        "--prompt",
        type=int,
        default=32,
        help="tokens of every prompt",
    )
    parser.add_argument(
        "--completion",
        type=int,
        default=32,
        help="tokens of every completion",
    )
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--budget", default="10m", help="of the search on rigs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rig_reuse.json"))
    return parser.parse_args()


def _question(arguments: argparse.Namespace, folder: Path) -> ParsedRequest:
    on_cpu = arguments.gpus.endswith("cpu")
    return parse_request(
        Flags(
            model=arguments.model or _made_up(folder),
            gpus=arguments.gpus,
            tuning="full" if on_cpu else "lora",
            space="demo" if on_cpu else None,
            global_batch=arguments.global_batch,
            max_prompt_length=arguments.prompt,
            max_completion_length=arguments.completion,
            hold=_holds(arguments),
            search=CPU_SEARCH if on_cpu else (),
            memory_limit=arguments.memory_limit,
            budget=arguments.budget,
            mode="probe",
            out=str(folder / "out"),
        )
    )


def _made_up(folder: Path) -> str:
    shape = ["--hidden", "128", "--intermediate", "768", "--layers", "2", "--vocab", "1024"]
    subprocess.run(
        [sys.executable, MADE_UP, str(folder / "model"), *shape],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return str(folder / "model")


def _search(understood: ParsedRequest, executor: Executor) -> Recommendation:
    job, trainer = replace(understood.job, fresh=True), understood.trainer
    job.out.mkdir(parents=True, exist_ok=True)
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    return run_search(
        job,
        study=study,
        executor=executor,
        listener=_say("on rigs"),
        clock=Clock(job.budget_seconds),
    )


def _warm_the_disk(understood: ParsedRequest) -> None:
    """Start once without counting: otherwise the first one would read the libraries from disk for
    both."""
    job, trainer = understood.job, understood.trainer
    first = legal_candidates(job, trainer)[0]
    with closing(open_executor(understood.job, understood.trainer)) as executor:
        executor.open(first).measure(first, ProbePlan(timed_cycles=1))


def _one_process_each(understood: ParsedRequest, probes: Sequence[Probe]) -> list[Measurement]:
    """Repeat the same probes, each in a new interpreter, from its start."""
    measured = []
    for number, probe in enumerate(probes):
        with closing(open_executor(understood.job, understood.trainer)) as executor:
            measured.append(executor.open(probe.candidate).measure(probe.candidate, probe.plan))
        print(
            f"apart {number + 1}/{len(probes)}: {measured[-1].cost.total_seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return measured


def _say(stage: str) -> Callable[[object], None]:
    began = time.monotonic()
    return lambda event: print(
        f"{stage} {time.monotonic() - began:.0f} s: {type(event).__name__}",
        file=sys.stderr,
        flush=True,
    )


def _result(
    arguments: argparse.Namespace,
    understood: ParsedRequest,
    answer: Recommendation,
    probes: Sequence[Probe],
    apart: Sequence[Measurement],
) -> dict[str, Any]:
    rigs = [probe.measurement.cost.total_seconds for probe in probes]
    apart_seconds = [measurement.cost.total_seconds for measurement in apart]
    further = []
    for p in probes:
        if not p.measurement.cost.load_seconds and p.plan.reuse_rollouts:
            further.append(p.measurement.cost.total_seconds)
    versions = next((dict(p.measurement.versions) for p in probes if p.measurement.versions), {})
    return {
        "about": "one search on rigs, and the same probes with one process per candidate",
        "machine": facts(versions),
        "question": {
            "hardware": str(understood.job.task.hardware),
            "space": understood.job.space.name,
            "memory_limit_bytes": understood.job.memory_limit_bytes,
            "holds": list(_holds(arguments)),
            "prompt": arguments.prompt,
            "completion": arguments.completion,
            "global_batch": arguments.global_batch,
        },
        "probes": [
            _row(probe, measurement) for probe, measurement in zip(probes, apart, strict=True)
        ],
        "loads": answer.counts.loads,
        "recommended": dict(answer.winner.candidate.knobs) if answer.winner else None,
        "seconds": {
            "rigs": round(sum(rigs), 2),
            "one_process_per_candidate": round(sum(apart_seconds), 2),
        },
        "further_candidate_seconds": {
            "rigs": _median(further),
            "one_process_per_candidate": _median(apart_seconds),
        },
        "ratio": round(sum(rigs) / sum(apart_seconds), 4),
    }


def _holds(arguments: argparse.Namespace) -> tuple[str, ...]:
    return CPU_HOLDS if arguments.gpus.endswith("cpu") else GPU_HOLDS


def _row(probe: Probe, apart: Measurement) -> dict[str, Any]:
    on_rig = probe.measurement
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    return {
        **{name: probe.candidate.knobs.get(name) for name in names},
        "long": not probe.plan.reuse_rollouts,
        "outcome": [str(on_rig.outcome), str(apart.outcome)],
        "seconds": [round(on_rig.cost.total_seconds, 3), round(apart.cost.total_seconds, 3)],
        "loading_seconds": [round(on_rig.cost.load_seconds, 3), round(apart.cost.load_seconds, 3)],
        "borrowed_seconds": round(on_rig.worst.borrowed_seconds, 3) if on_rig.worst else None,
        "tokens_per_second": [_rate(on_rig), _rate(apart)],
        "peak_bytes": [on_rig.memory.peak_bytes, apart.memory.peak_bytes],
    }


def _rate(measurement: Measurement) -> float | None:
    return round(measurement.worst.tokens_per_second, 1) if measurement.worst else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


if __name__ == "__main__":
    main()
