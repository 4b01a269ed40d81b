"""Survey the step models that the package ships: `make step-models`.

Each family of `FAMILIES` is surveyed for each model and GPU, with the installed releases, and
written to `autotune/prediction/step_models/`. A family whose file is there already is left out;
delete the folder to renew all. Names of models as arguments restrict the survey to them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.errors import AutotuneError
from autotune.core.files import write_atomically
from autotune.core.space import Candidate, KnobValue
from autotune.estimate.screening import Point, StepModel
from autotune.estimate.screening.request_points import Request
from autotune.prediction.opening import open_step_models, open_tracers
from autotune.prediction.service import PredictionService
from autotune.prediction.step_model_file import SurveyedModel, packed
from autotune.prediction.step_models import SHIPPED, StepModels, shipped_name
from autotune.request.flags import flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources

MODELS = (
    "Qwen2.5-7B",
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Llama-3.1-8B",
    "Qwen3-0.6B",
    "Qwen3-8B",
    "Qwen2.5-3B",
    "Llama-3.2-1B",
)
GPUS = ("2xA100-40G", "2xH100")
"""One GPU of each generation; two of them, for sharding."""

Knobs = Mapping[str, KnobValue]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Flags of a request, and changes of it that are families of their own."""

    flags: Mapping[str, str]
    changes: Sequence[Knobs] = field(default=({},))


CHECKPOINTING_OFF: Knobs = {"gradient_checkpointing": False}
VLLM: Knobs = {"use_vllm": True}
ONE_ROW: Knobs = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32}
"""A step of a single row is another family, and under full tuning one of few tokens."""

ONE_STEP: Knobs = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
TWO_STEPS: Knobs = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
"""Few micro-steps, as on many GPUs at the same global batch."""

LORA: Sequence[Knobs] = (
    {},
    VLLM,
    CHECKPOINTING_OFF,
    ONE_ROW,
    {**VLLM, **ONE_ROW},
    {"sharding": "zero3"},
    {"sharding": "zero3", **VLLM},
    {"sharding": "zero2"},
    {**VLLM, **CHECKPOINTING_OFF},
    ONE_STEP,
    TWO_STEPS,
    {**VLLM, **ONE_STEP},
    {**VLLM, **TWO_STEPS},
)
FULL: Sequence[Knobs] = (
    {},
    VLLM,
    ONE_ROW,
    {"sharding": "zero3"},
    {"sharding": "zero2"},
    CHECKPOINTING_OFF,
    ONE_STEP,
    TWO_STEPS,
)
SFT: Sequence[Knobs] = ({}, ONE_ROW, CHECKPOINTING_OFF)

FAMILIES = (
    Family(flags={"tuning": "lora"}, changes=LORA),
    Family(flags={"tuning": "lora", "method": "sft"}, changes=SFT),
    Family(flags={"tuning": "full"}, changes=FULL),
    Family(flags={"tuning": "full", "method": "sft"}, changes=SFT),
)


class ShippedModels(StepModels):
    """The models of the package itself, to be written."""

    def model_of(self, request: Request, points: Sequence[Point]) -> SurveyedModel | None:
        return self._of_package(request)

    def surveyed_points(self, request: Request) -> tuple[Point, ...]:
        return ()

    def is_refused(self, request: Request) -> bool:
        return False

    def refuse(self, request: Request) -> None:
        print("  has no model", flush=True)

    def keep(self, request: Request, model: StepModel, points: Sequence[Point]) -> None:
        versions = dict(model.trace.versions)
        content = packed(SurveyedModel(model=model, points=tuple(points), versions=versions))
        SHIPPED.mkdir(exist_ok=True)
        file = SHIPPED / shipped_name(request, self._adapter)
        write_atomically(file, content)
        print(f"  {file.name}: {len(content):,} bytes, off by {model.residual:.2g}", flush=True)


def survey_families(model: str, gpus: str, family: Family) -> None:
    """Survey the families of one model; those after the first reuse its formulas."""
    sources = read_sources(flags_of({"model": model, "gpus": gpus, **family.flags}), mode="predict")
    request = sources.parse(limit_prompts=True)
    job, trainer = request.job, request.trainer
    installed = open_step_models(job.task, trainer)
    service = PredictionService(
        task=job.task,
        trainer=trainer,
        limit_bytes=job.memory_limit_bytes,
        tracer=open_tracers(job.task, trainer),
        models=ShippedModels(installed._read_versions, trainer.trace_adapter),
    )
    with contextlib.closing(service):
        for change, candidate in _candidates(request, family):
            began = time.monotonic()
            print(f"{model} {gpus} {dict(family.flags)} {dict(change)}", flush=True)
            try:
                service.predict(candidate)
            except AutotuneError as error:
                print(f"  {error}", flush=True)
            print(f"  {time.monotonic() - began:.0f} s", flush=True)


def _candidates(request: ParsedRequest, family: Family) -> Iterator[tuple[Knobs, Candidate]]:
    task = request.job.task
    base = candidate_of_job(request)
    for change in family.changes:
        knobs = request.whole_space.with_remedies({**base.knobs, **change})
        candidate = request.trainer.complete(knobs, task)
        if request.trainer.why_illegal(candidate, task) is None:
            yield change, candidate


def main(models: Sequence[str]) -> None:
    for family in FAMILIES:
        for gpus in GPUS:
            for model in models:
                survey_families(model, gpus, family)
    files = list(Path(SHIPPED).glob("*"))
    print(f"{len(files)} models, {sum(file.stat().st_size for file in files):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:] or MODELS)
