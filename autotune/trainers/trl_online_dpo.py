"""TRL's online DPO: an experimental trainer without a command. A script is written for it, and reads the same YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.candidate import Candidate, Knobs
from autotune.composition import Composition
from autotune.space import SearchSpace
from autotune.trainers import trl_files, trl_legality
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.trl import TrlGrpo, baseline_value, dataset_of, first_legal, shapes_of
from autotune.trainers.trl_compose import pairs
from autotune.trainers.trl_online_dpo_script import SCRIPT
from autotune.trainers.trl_settings import A_PAIR, load_of, pairs_settings
from autotune.trainers.trl_topology import ranks_of


class TrlOnlineDpo(TrlGrpo):
    """Each micro-step writes two completions to each of its prompts, and learns which was the better one."""

    method = "online-dpo"
    space = "online-dpo"
    canonical: Mapping[str, str] = {
        "max_prompt_length": "max_prompt_length", "max_completion_length": "max_new_tokens", "lora_r": "lora_r",
    }  # fmt: skip

    completions_each = A_PAIR
    """Of a row of its batches, where a global batch counts completions."""

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        held = {self.canonical.get(name, name): value for name, value in job.workload.held.items()}
        given = {**held, **{name: value for name, value in knobs.items() if value is not None}}
        settings = pairs_settings(given, job, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return next(trl_legality.pairs_refusals(candidate.settings, job, self.method), None)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first legal one of the user's or TRL's own batch shape at the held learning knobs."""
        fixed = {knob.name: baseline_value(knob.name, knob.choices, knob.effect, job, self.method) for knob in space.knobs}
        return first_legal(self, space, job, fixed, shapes_of(job, ranks_of(job.workload.held, job.hardware.count), each=A_PAIR))

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        """The trainer evaluates nothing: it knows no loss of rows that it has not written itself."""
        return {**super().probe_request(candidate, job, plan), "evaluation": None}

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return pairs(super().compose(candidate, job))

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        return trl_files.write_files(candidate, job, folder, dataset_of(job), program=SCRIPT)


TRAINERS = (TrlOnlineDpo(),)
