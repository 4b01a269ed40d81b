"""The trainer of a user's own script: any of TRL's, measured as the script builds it, recommended as a change of the script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.candidate import Candidate, Knobs
from autotune.composition import Composition
from autotune.own_script import OwnScript
from autotune.space import SearchSpace
from autotune.trainers import trl_own_files
from autotune.trainers.base import Job, ProbePlan, PromptLengths, RowLengths, Trainer
from autotune.trainers.trl_fields import Field


class OwnTrainer:
    """A trainer of TRL's, as `autotune.trainers.base.Trainer` describes it, inside a script of the user's."""

    adapter = "trl_script"

    def __init__(self, inner: Trainer, script: OwnScript) -> None:
        self._inner, self._script = inner, script
        self.name, self.method, self.space = inner.name, inner.method, inner.space
        self.canonical, self.said_by = inner.canonical, inner.said_by
        self.trace_adapter, self.needs, self.measures = inner.trace_adapter, inner.needs, inner.measures

    def fields(self) -> Mapping[str, Field]:
        return self._inner.fields()

    def complete(self, knobs: Knobs, job: Job) -> Candidate:
        return self._inner.complete(knobs, job)

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        return self._inner.why_illegal(candidate, job)

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        return self._inner.baseline(space, job)

    def prompt_lengths(self, job: Job, limit: int | None = None) -> PromptLengths | None:
        """As the look saw them; of how many rows are beyond a limit it knows the percentiles alone."""
        look = self._script.look
        if look.prompts is None or look.rows is None:
            return None
        percentiles = {int(share): length for share, length in look.prompts.items()}
        within = max((share for share, length in percentiles.items() if limit is None or length <= limit), default=0)
        return PromptLengths(rows=look.rows, kept=look.rows * within // 100, percentiles=percentiles)

    def row_lengths(self, job: Job) -> RowLengths | None:
        """What its script trains on, only the script knows."""
        return None

    def load_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        script = self._script
        asked = {
            "path": str(Path(script.path)),
            "arguments": list(script.arguments),
            "method": script.look.method,
            "gives_model": script.look.model.given,
            "rewards": script.rewards,
        }
        return {**self._inner.load_request(candidate, job), "script": asked}

    def probe_request(self, candidate: Candidate, job: Job, plan: ProbePlan) -> Mapping[str, object]:
        return {**self._inner.probe_request(candidate, job, plan), "dataset": None, "reward_funcs": None}

    def trace_request(self, candidate: Candidate, job: Job) -> Mapping[str, object]:
        return self._inner.trace_request(candidate, job)

    def shortest(self, candidate: Candidate, job: Job) -> Candidate | None:
        return self._inner.shortest(candidate, job)

    def compose(self, candidate: Candidate, job: Job) -> Composition:
        return self._inner.compose(candidate, job)

    def write_files(self, candidate: Candidate, job: Job, folder: Path) -> list[Path]:
        """A patch of the script, flags where it takes them, and what starts it."""
        return trl_own_files.write_files(candidate, job, folder, self._script, self.fields())
