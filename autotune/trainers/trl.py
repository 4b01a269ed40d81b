"""TRL's GRPOTrainer: the static side, without TRL. What runs it is `inside/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.composition import Composition
from autotune.space import SearchSpace
from autotune.trainers import trl_files, trl_legality
from autotune.trainers.base import Job, ProbePlan, PromptLengths, RowLengths, Trainer
from autotune.trainers.trl_compose import compose
from autotune.trainers.trl_evaluation import evaluation_request
from autotune.trainers.trl_fields import Field, fields
from autotune.trainers.trl_prompts import prompt_lengths
from autotune.trainers.trl_requests import (
    adapter_request,
    launch_request,
    refuse_what_no_probe_runs,
    server_request,
    trace_request,
    trainer_settings,
)  # fmt: skip
from autotune.trainers.trl_settings import default, load_of, max_num_seqs, settings_of
from autotune.trainers.trl_topology import PLAIN, ranks_of, with_server

DATASET_KEYS = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "datasets",
    "streaming", "test_split_size",
)  # fmt: skip

DEFAULT_MICRO_BATCH = 8
LENGTHS = ("max_prompt_length", "max_completion_length")


class TrlGrpo:
    """GRPO with TRL, as `autotune.trainers.base.Trainer` describes a framework."""

    name = "trl"
    method = "grpo"
    adapter = "trl_grpo"
    trace_adapter = "trl_trace"
    needs: tuple[str, ...] = ("trl",)
    space = "grpo"
    measures = True
    canonical: Mapping[str, str] = {name: name for name in (*LENGTHS, "num_generations", "lora_r")}
    said_by: Mapping[str, tuple[str, ...]] = {}

    def fields(self) -> Mapping[str, Field]:
        return fields(self.method)

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        settings = settings_of(knobs, job, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return trl_legality.why_illegal(candidate.settings, job)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first legal one of the user's or TRL's own batch shape at the held learning knobs."""
        fixed = {knob.name: baseline_value(knob.name, knob.choices, knob.effect, job, self.method) for knob in space.knobs}
        return first_legal(self, space, job, fixed, _batch_shapes(space, job))

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        workload, settings = job.workload, candidate.settings
        return {
            "method": self.method,
            "model": {
                "name": workload.model.name,
                "folder": None if workload.model.folder is None else str(workload.model.folder),
                "config": dict(workload.model.config),
                "weights": workload.weights,
                "dtype": settings["dtype"],
                "attn_implementation": settings.get("attn_implementation"),
                "load_in_4bit": bool(settings.get("load_in_4bit")),
                "load_in_8bit": bool(settings.get("load_in_8bit")),
            },
            "adapter": adapter_request(candidate, job),
            "engine": _engine_request(candidate),
            "server": server_request(candidate),
            "launch": launch_request(candidate, job),
            "device": job.hardware.kind,
            "seed": workload.seed,
            "trust_remote_code": workload.trust_remote_code,
        }

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        refuse_what_no_probe_runs(job)
        settings, user = candidate.settings, job.workload.user_settings
        longest = settings["max_completion_length"]
        typical = job.workload.typical_completion_length
        return {
            "settings": trainer_settings({**user, **settings}, self.method),
            "lengths": {
                "prompt": settings["max_prompt_length"],
                "completion": longest,
                "typical": None if typical is None or not isinstance(longest, int) else min(typical, longest),
            },
            "dataset": dataset_of(job),
            "reward_funcs": user.get("reward_funcs"),
            "evaluation": evaluation_request(job),
            "plan": asdict(plan),
            "seed": job.workload.seed,
        }

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        settings = candidate.settings
        return trace_request(candidate, job, _int(settings["max_prompt_length"]), _int(settings["max_completion_length"]))

    def prompt_lengths(self, job: Job, limit: int | None = None) -> PromptLengths | None:
        return prompt_lengths(job, dataset_of(job), limit)

    def row_lengths(self, job: Job) -> RowLengths | None:
        """Rows are written, not given."""
        return None

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        return trl_files.write_files(candidate, job, folder, dataset_of(job))

    def shortest(self, candidate: Candidate, job: Job) -> None:
        """TRL pads."""

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        """Which models are resident for this candidate."""
        return compose(candidate, job)


def dataset_of(job: Job) -> Mapping[str, object] | None:
    """What TRL would load, in its own words; None where nothing was named."""
    named = {name: job.workload.user_settings[name] for name in DATASET_KEYS if name in job.workload.user_settings}
    if job.workload.dataset is not None:
        named = {**{name: value for name, value in named.items() if name != "datasets"}, "dataset_name": job.workload.dataset}
    return named if named.get("dataset_name") or named.get("datasets") else None


def first_legal(trainer: Trainer, space: SearchSpace, job: Job, fixed: Knobs, shapes: Iterable[Mapping[str, KnobValue]]) -> Knobs:
    """The fixed knobs with the first batch shape that is legal; with the first of all where none is."""
    first: Knobs | None = None
    for shape in shapes:
        knobs = space.applicable({**fixed, **{name: value for name, value in shape.items() if name in space}})
        first = first or knobs
        if trainer.why_illegal(trainer.complete(knobs, job), job) is None:
            return knobs
    return first or space.applicable(fixed)


def baseline_value(name: str, choices: tuple[KnobValue, ...], effect: str, job: Job, method: str) -> KnobValue:
    """Held by the user; else TRL's own default where it is the user's file that is run, or the knob is neutral; else the
    most preferred value."""
    if name in job.workload.held:
        return job.workload.held[name]
    if job.workload.config_file is not None and name in fields(method) and None not in choices:
        return default(name, method)
    if PLAIN.get(name) in choices and name in PLAIN:
        return PLAIN[name]
    if effect == "learning" or len(choices) == 1 or name not in fields(method):
        return choices[0]
    return default(name, method)


def shapes_of(job: Job, ranks: int, *, each: int = 1) -> Iterator[dict[str, KnobValue]]:
    """Micro-batch and accumulation that make the global batch, with so many completions to each row: the largest micro-batch up
    to TRL's own first."""
    held, total = job.workload.held, job.workload.global_batch
    micro_name, steps_name = "per_device_train_batch_size", "gradient_accumulation_steps"
    named = held.get(micro_name)
    for micro in [named] if isinstance(named, int) else range(DEFAULT_MICRO_BATCH, 0, -1):
        per_step = each * micro * ranks
        if steps_name in held or total is None:
            yield {micro_name: micro, steps_name: held.get(steps_name, 1)}
        elif per_step and total % per_step == 0:
            yield {micro_name: micro, steps_name: total // per_step}


def _batch_shapes(space: SearchSpace, job: Job) -> Iterator[dict[str, KnobValue]]:
    """Micro-batch and accumulation, closest to TRL's defaults first: the largest micro-batch up to 8 that is legal."""
    held = job.workload.held
    micro_name, steps_name = "per_device_train_batch_size", "gradient_accumulation_steps"
    micros: list[KnobValue] = [held[micro_name]] if micro_name in held else list(range(DEFAULT_MICRO_BATCH, 0, -1))
    for micro in micros:
        if steps_name in held:
            yield {micro_name: micro, steps_name: held[steps_name]}
            continue
        total, per_step = job.workload.global_batch, _int(micro) * ranks_of(held, job.hardware.count)
        if total is None:
            yield from ({micro_name: micro, steps_name: steps} for steps in range(1, 129))
        elif per_step and total % per_step == 0:
            yield {micro_name: micro, steps_name: total // per_step}


def _engine_request(candidate: Candidate) -> dict[str, object] | None:
    settings = candidate.settings
    if not settings["use_vllm"] or with_server(settings):
        return None
    names = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
    request: dict[str, object] = {name: settings[name] for name in names}
    if "vllm_model_impl" in settings:
        request["vllm_model_impl"] = settings["vllm_model_impl"]
    return {**request, "max_num_seqs": max_num_seqs(settings)}


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


TRAINERS = (TrlGrpo(),)
