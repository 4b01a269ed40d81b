"""TRL's other methods: RLOO, which generates as GRPO does, and SFT and DPO, which train on given rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from autotune.candidate import Candidate, Knobs, KnobValue
from autotune.errors import CannotPredict
from autotune.space import SearchSpace
from autotune.trainers import trl_legality
from autotune.trainers.base import Job, ProbePlan, RowLengths
from autotune.trainers.rows import row_lengths
from autotune.trainers.trl import LENGTHS, TrlGrpo, dataset_of, first_legal, shapes_of
from autotune.trainers.trl_evaluation import evaluation_request
from autotune.trainers.trl_requests import refuse_what_no_probe_runs, trainer_settings
from autotune.trainers.trl_settings import default, load_of, offline_settings


class TrlRloo(TrlGrpo):
    """RLOO with TRL."""

    method = "rloo"
    space = "rloo"


class TrlOffline(TrlGrpo):
    """SFT or DPO with TRL."""

    canonical: Mapping[str, str] = {name: name for name in (*LENGTHS, "lora_r")}

    def __init__(self, method: str) -> None:
        self.method = method
        self.space = method

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        settings = offline_settings(knobs, job, self.method)
        return Candidate(knobs=knobs, settings=settings, load=load_of(settings, job))

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return next(trl_legality.offline_refusals(candidate.settings, job, self.method), None)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first legal one of TRL's own values, or the most preferred where the method lacks the setting."""
        fixed = {knob.name: self._baseline_value(knob.name, knob.choices, knob.effect, job) for knob in space.knobs}
        return first_legal(self, space, job, fixed, shapes_of(job, job.hardware.count))

    def prompt_lengths(self, job: Job, limit: int | None = None) -> None:
        """Prompts have no limit of their own here."""

    def row_lengths(self, job: Job) -> RowLengths | None:
        return row_lengths(job, dataset_of(job)) if self.method == "sft" else None

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        refuse_what_no_probe_runs(job)
        settings, user = candidate.settings, job.workload.user_settings
        return {
            "settings": trainer_settings({**user, **settings}, self.method),
            "lengths": {
                "prompt": settings["max_prompt_length"],
                "completion": settings["max_completion_length"],
                "typical": None,
            },
            "dataset": dataset_of(job),
            "evaluation": evaluation_request(job),
            "plan": asdict(plan),
            "seed": job.workload.seed,
        }

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        if candidate.settings.get("activation_offloading"):
            raise CannotPredict(
                "activation_offloading moves activations to the host over a CUDA stream, which no step without a GPU has.",
                way_out="Leave it out for what is needed at most, or measure it where the GPU is: autotune run.",
            )
        return super().trace_request(candidate, job)

    def _baseline_value(self, name: str, choices: tuple[KnobValue, ...], effect: str, job: Job) -> KnobValue:
        if name in job.workload.held:
            return job.workload.held[name]
        if effect == "learning" or len(choices) == 1 or name not in self.fields():
            return choices[0]
        return default(name, self.method)


TRAINERS = (TrlRloo(), TrlOffline("sft"), TrlOffline("dpo"))
