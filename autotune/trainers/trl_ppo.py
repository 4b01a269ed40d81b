"""TRL's PPO: an experimental trainer without a command, up to release 1.12. A script is written for it, and reads a YAML.

It is measured where such a release is installed. Its step can't be followed where it is absent, so a plain one stands in for it
in predictions (`trl_ppo_step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from autotune.candidate import Candidate, Knobs
from autotune.composition import Composition
from autotune.space import SearchSpace
from autotune.trainers import trl_files, trl_legality
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.generic_step import STAND_IN, compose, trace_request
from autotune.trainers.trl import TrlGrpo, baseline_value, dataset_of, first_legal, shapes_of
from autotune.trainers.trl_ppo_script import SCRIPT
from autotune.trainers.trl_ppo_step import step_of
from autotune.trainers.trl_settings import episodes_settings, load_of
from autotune.trainers.trl_topology import ranks_of


class TrlPpo(TrlGrpo):
    """Policy, reference, critic and reward model on every rank."""

    method = "ppo"
    space = "ppo"
    trace_adapter = STAND_IN
    requires: ClassVar[Mapping[str, str]] = {"trl": "trl>=1.0,<1.13"}
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length", "max_completion_length": "response_length", "lora_r": "lora_r",
    }  # fmt: skip

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items()}
        given = {**held, **{name: value for name, value in knobs.items() if value is not None}}
        settings = episodes_settings(given, job, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return next(trl_legality.episodes_refusals(candidate.settings, job, self.method), None)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first legal one of the user's or TRL's own batch shape at the held learning knobs."""
        fixed = {knob.name: baseline_value(knob.name, knob.choices, knob.effect, job, self.method) for knob in space.knobs}
        return first_legal(self, space, job, fixed, shapes_of(job, ranks_of(job.workload.held, job.hardware.count)))

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        """Its trainer evaluates nothing by itself."""
        return {**super().probe_request(candidate, job, plan), "evaluation": None}

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        return trace_request(step_of(candidate, job), job)

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return compose(step_of(candidate, job), job)

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        return trl_files.write_files(candidate, job, folder, dataset_of(job), program=SCRIPT)


TRAINERS = (TrlPpo(),)
