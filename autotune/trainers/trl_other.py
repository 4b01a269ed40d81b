"""TRL's other methods, for prediction alone: SFT, DPO and RLOO. Probes do not run them yet, and say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import yaml

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.composition import Composition
from autotune.errors import IllegalConfiguration
from autotune.space import SearchSpace
from autotune.trainers import trl_legality
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.trl import TrlGrpo, first_legal
from autotune.trainers.trl_compose import compose
from autotune.trainers.trl_fields import Field, fields
from autotune.trainers.trl_requests import trace_request
from autotune.trainers.trl_settings import OWN_SETTINGS, default, load_of, offline_settings, settings_of

ONLINE = frozenset({"rloo"})
"""Methods that write their own completions, with GRPO's batch rules."""

YAML_NAME = "recommended.yaml"


class TrlForesight:
    """One of TRL's methods, as `autotune.trainers.base.Trainer` describes a framework, without the running."""

    name = "trl"
    adapter = "trl_grpo"
    trace_adapter = "trl_trace"
    needs: tuple[str, ...] = ("trl",)
    measures = False

    def __init__(self, method: str) -> None:
        self.method = method
        self.space = method

    def fields(self) -> Mapping[str, Field]:
        return fields(self.method)

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        settings = settings_of(knobs, job, self.method) if self.method in ONLINE else offline_settings(knobs, job, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        if self.method in ONLINE:
            return trl_legality.why_illegal(candidate.settings, job)
        return next(trl_legality.offline_refusals(candidate.settings, job, self.method), None)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first legal one of TRL's own values, or the most preferred where the method lacks the setting."""
        if self.method in ONLINE:
            return TrlGrpo.baseline(self, space, job)  # type: ignore[arg-type]
        fixed = {knob.name: self._baseline_value(knob.name, knob.choices, knob.effect, job) for knob in space.knobs}
        return first_legal(self, space, job, fixed, _batch_shapes(space, job))

    def prompt_lengths(self, job: Job, limit: int | None = None) -> None:
        """Not read: nothing is measured here, so nothing gives way to it."""

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        self._refuse()

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        self._refuse()

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        prompt, completion = (candidate.settings[name] for name in ("max_prompt_length", "max_completion_length"))
        assert isinstance(prompt, int) and isinstance(completion, int)
        return trace_request(candidate, job, prompt, completion)

    def shortest(self, candidate: Candidate, job: Job) -> None:
        """TRL pads."""

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return compose(candidate, job)

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """What `trl sft --config` takes. It was only predicted, so there is nothing to launch it with."""
        folder.mkdir(parents=True, exist_ok=True)
        known = self.fields()
        settings = {**job.workload.held, **job.workload.user_settings, **candidate.settings}
        content = {name: value for name, value in settings.items() if name in known and name not in OWN_SETTINGS}
        head = f"# {self.method.upper()} for {job.workload.model.name} on {job.hardware}: predicted, not measured.\n"
        head += f"# Add dataset_name and start it with: trl {self.method} --config {YAML_NAME}\n"
        body = yaml.safe_dump({"model_name_or_path": job.workload.model.name, **content}, sort_keys=False, allow_unicode=True)
        (folder / YAML_NAME).write_text(head + body, encoding="utf-8")
        return [folder / YAML_NAME]

    def _refuse(self) -> NoReturn:
        raise IllegalConfiguration(
            f"{self.method.upper()} can be predicted, but not run by probes yet.",
            way_out="Ask `autotune predict`, or add --mode predict.",
        )

    def _baseline_value(self, name: str, choices: tuple[KnobValue, ...], effect: str, job: Job) -> KnobValue:
        if name in job.workload.held:
            return job.workload.held[name]
        if effect == "learning" or len(choices) == 1 or name not in self.fields():
            return choices[0]
        return default(name, self.method)


def _batch_shapes(space: SearchSpace, job: Job) -> Iterator[dict[str, KnobValue]]:
    """Micro-batch and accumulation that make the global batch: the largest micro-batch up to TRL's own first."""
    held, ranks = job.workload.held, job.hardware.count
    micro_name, steps_name = "per_device_train_batch_size", "gradient_accumulation_steps"
    named = held.get(micro_name)
    for micro in [named] if isinstance(named, int) else range(8, 0, -1):
        total = job.workload.global_batch
        if steps_name in held or total is None:
            yield {micro_name: micro, steps_name: held.get(steps_name, 1)}
        elif total % (micro * ranks) == 0:
            yield {micro_name: micro, steps_name: total // (micro * ranks)}
