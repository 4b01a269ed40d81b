"""Launched frameworks on emulated cards: GRPO by their own code, beside the stand-in's prediction.

make bench-emulated-frameworks

Each framework trains a few real steps with vLLM in an environment of its own (`make
cuda-frameworks`), started by the command that autotune renders. Weights are the right shapes
without content. Writes results/emulated_frameworks.json. Its figures are emulated and predicted,
not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import machine
from empty_model import write_empty_model

from autotune.catalog.model_lookup import find_model
from autotune.core.measurement import ProbePlan
from autotune.core.plain_data import plain
from autotune.emulator.cards import emulated_machine
from autotune.emulator.launch import Rehearsed, rehearse
from autotune.frameworks.launched_run import OUT, Launch, Launched
from autotune.machine import environment
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.worker.launched_output import MetricReader, line_source

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "emulated_frameworks.json"
PACKAGES = (
    "torch",
    "vllm",
    "transformers",
    "trl",
    "peft",
    "ray",
    "deepspeed",
    "ms-swift",
    "verl",
    "openrlhf",
    "skyrl",
)
PREDICTED = (
    "peak_memory_bytes",
    "torch_peak_allocated_bytes",
    "torch_peak_reserved_bytes",
    "fits",
    "phases",
)
GPUS, MODEL, STEPS = "2xA100-40G", "Qwen2.5-0.5B", 3
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PADDING_ALONE = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
"""Environment in which flash-attn imports without kernels, which have no wheel: its padding of
rows is Python.
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One framework's GRPO with vLLM on the training GPUs."""

    name: str
    framework: str
    method: str = "grpo"
    tuning: str = "lora"
    gpus: str = GPUS
    global_batch: int = 8
    prompt_tokens: int | None = 256
    completion_tokens: int | None = 64
    generations: int | None = 4
    holds: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Words of the command that no prediction depends on."""

    environment: Mapping[str, str] = field(default_factory=dict)


SWIFT = (
    "per_device_train_batch_size=4",
    "vllm_gpu_memory_utilization=0.4",
    "sleep_level=1",
    "model_type=qwen2",
    "template=qwen2_5",
)
SETUPS = (
    Setup(
        name="swift",
        framework="swift",
        holds=(*SWIFT, "vllm_enable_lora=true"),
    ),
    Setup(
        name="swift, whole weights",
        framework="swift",
        holds=(*SWIFT, "vllm_enable_lora=false"),
    ),
    Setup(
        name="verl",
        framework="verl",
        tuning="full",
        global_batch=16,
        holds=(
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.enforce_eager=true",
            "actor_rollout_ref.model.use_remove_padding=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        ),
        # flash-attn has no wheel; Ray gives each worker a core of its own, of which two are here.
        added=(
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            "reward.num_workers=1",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
            "ray_kwargs.ray_init.num_cpus=32",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "data.dataloader_num_workers=0",
        ),
    ),
    Setup(
        name="openrlhf",
        framework="openrlhf",
        tuning="full",
        global_batch=16,
        holds=(
            "rollout.batch_size=4",
            "train.batch_size=16",
            "train.micro_batch_size=4",
            "rollout.micro_batch_size=4",
            "ds.packing_samples=false",
            "vllm.gpu_memory_utilization=0.4",
            "vllm.enforce_eager=true",
            "ds.attn_implementation=sdpa",
        ),
        environment=PADDING_ALONE,
    ),
    Setup(
        name="skyrl",
        framework="skyrl",
        tuning="full",
        global_batch=16,
        holds=(
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.micro_train_batch_size_per_gpu=4",
            "trainer.micro_forward_batch_size_per_gpu=4",
            "trainer.flash_attn=false",
            "trainer.remove_microbatch_padding=false",
            "trainer.placement.colocate_all=true",
            "generator.inference_engine.gpu_memory_utilization=0.4",
            "generator.inference_engine.enforce_eager=true",
            "generator.inference_engine.tensor_parallel_size=1",
        ),
        environment=PADDING_ALONE,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments",
        type=Path,
        required=True,
        help="folder with cuda-swift, cuda-verl and the others",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument(
        "names", nargs="*", help="only these setups; the others stay in the file as they are"
    )
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else {}
    for setup in SETUPS:
        if not options.names or setup.name in options.names:
            rows[setup.name] = run(
                setup, options.environments / f"cuda-{setup.framework}" / "bin" / "python"
            )
    options.out.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
    return int(any(row["exit_code"] for row in rows.values()))


def run(setup: Setup, python: Path) -> dict[str, Any]:
    """Rehearse and predict one setup."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="emulated-framework-") as name:
        folder = Path(name)
        write_empty_model(folder / "model", find_model(MODEL).config)
        request = request_of(setup, str(folder / "model"), python)
        launch = cast(Launched, request.trainer).launch(
            candidate_of_job(request), request.job.task, plan()
        )
        figures = asdict(launch.figures)
        lines = line_source(figures, folder)
        prediction = _predicted(request)  # first: it may fail, and takes a minute, not ten
        rehearsal = rehearse(
            command(launch, setup, folder), emulated_machine(setup.gpus), python, sys.stderr.write
        )
        steps = records(figures, lines(list(rehearsal.output)))
    return {
        "setup": {
            "model": MODEL,
            "gpus": setup.gpus,
            "tuning": setup.tuning,
            "settings": dict(candidate_of_job(request).settings),
        },
        "ran_on": machine.facts(
            {k: v for k, v in environment.versions(python, PACKAGES).items() if v}
        ),
        "seconds": round(time.monotonic() - began),
        "exit_code": rehearsal.code,
        "error": rehearsal.failure and rehearsal.failure.message,
        "steps": steps,
        "emulated": rows_of_processes(rehearsal),
        "predicted": prediction,
    }


def predicted_anew(setup: Setup, python: Path) -> Mapping[str, Any]:
    """Predict one setup alone."""
    with tempfile.TemporaryDirectory(prefix="emulated-framework-") as name:
        folder = Path(name)
        write_empty_model(folder / "model", find_model(MODEL).config)
        return _predicted(request_of(setup, str(folder / "model"), python))


def request_of(
    setup: Setup,
    model: str,
    python: Path,
) -> ParsedRequest:
    return parse_request(
        Flags(
            framework=setup.framework,
            method=setup.method,
            model=model,
            gpus=setup.gpus,
            python=str(python),
            mode="predict",
            tuning=setup.tuning,
            hold=setup.holds,
            max_prompt_length=setup.prompt_tokens,
            max_completion_length=setup.completion_tokens,
            num_generations=setup.generations,
            global_batch=setup.global_batch,
        )
    )


def plan() -> ProbePlan:
    return replace(
        ProbePlan(),
        optimizer_steps=STEPS,
        warmup_cycles=1,
        timed_cycles=STEPS - 1,
    )


def command(
    launch: Launch,
    setup: Setup,
    folder: Path,
) -> list[str]:
    for name, text in launch.files.items():
        (folder / name).write_text(text)
    arguments = []
    for name, value in {**launch.environment, **setup.environment}.items():
        arguments.append(f"{name}={shlex.quote(value)}")
    arguments += map(shlex.quote, (*launch.argv, *setup.added))
    return ["bash", "-c", "env " + " ".join(arguments).replace(OUT, str(folder))]


def records(figures: Mapping[str, Any], lines: Sequence[str]) -> int:
    """Return how many steps the framework's own log has."""
    reader = MetricReader(figures)
    for line in lines:
        reader.read(line, 0.0)
    return reader.records


def rows_of_processes(rehearsal: Rehearsed) -> dict[str, Any]:
    processes = []
    for process in rehearsal.report.processes:
        for card, peak in process.peak_bytes.items():
            processes.append(
                {
                    "role": process.role,
                    "rank": process.rank,
                    "card": card,
                    "peak_bytes": peak,
                    "torch_allocated_bytes": process.torch_allocated_bytes.get(card),
                    "torch_reserved_bytes": process.torch_reserved_bytes.get(card),
                    "phase_peak_bytes": {
                        name: peaks[card]
                        for name, peaks in process.phase_peak_bytes.items()
                        if card in peaks
                    },
                }
            )
    return {
        "cards": rehearsal.report.card_peak_bytes,
        "processes": processes,
        "doubts": rehearsal.report.sentences(),
    }


def _predicted(request: ParsedRequest) -> Mapping[str, Any]:
    job = request.job
    with contextlib.closing(open_tracers(job.task, request.trainer)) as tracers:
        service = PredictionService(
            task=job.task,
            trainer=request.trainer,
            limit_bytes=job.memory_limit_bytes,
            tracer=tracers,
        )
        predicted: dict[str, Any] = plain(service.predict(candidate_of_job(request)))
    return {name: predicted[name] for name in PREDICTED}


if __name__ == "__main__":
    raise SystemExit(main())
