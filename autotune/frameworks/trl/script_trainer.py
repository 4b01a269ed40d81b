"""Trainer that measures the user's own training script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autotune.core.dataset import PromptLengths
from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.core.user_script import UserScript
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl.script_files import write_files
from autotune.frameworks.trl.script_inspection import former_table


def script_trainer(inner: Trainer, script: UserScript) -> Trainer:
    """Return `inner` for a script of the user."""
    return cast("Trainer", _ScriptTrainer(inner, script))


class _ScriptTrainer:
    """TRL trainer inside a script of the user. Members that are not defined here are those of
    `inner`.
    """

    adapter = "trl.script_probe"

    def __init__(self, inner: Trainer, script: UserScript) -> None:
        self._inner = inner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        """Return the inspected lengths. The number of rows within `limit` is exact to a
        percentile.
        """
        look = self._script.look
        if look.prompts is None or look.rows is None:
            return None
        percentiles = {int(share): length for share, length in look.prompts.items()}
        within = 0
        for share, length in percentiles.items():
            if limit is None or length <= limit:
                within = max(within, share)
        rows_within = look.rows * within // 100
        return PromptLengths(
            rows=look.rows,
            kept=rows_within,
            percentiles=percentiles,
        )

    def image_rows(self, task: Task) -> None:
        """Return None: the script prepares its own rows."""

    row_lengths = image_rows

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        script = self._script
        return {
            **self._inner.load_request(candidate, task),
            "script": {
                "path": str(Path(script.path)),
                "arguments": list(script.arguments),
                "method": script.look.method,
                "gives_model": script.look.model.given,
                "rewards": script.rewards,
                "former": former_table(),
            },
        }

    def probe_request(
        self,
        candidate: Candidate,
        task: Task,
        plan: ProbePlan,
    ) -> Mapping[str, object]:
        request = self._inner.probe_request(candidate, task, plan)
        return {**request, "dataset": None, "reward_funcs": None}

    def write_files(
        self,
        candidate: Candidate,
        task: Task,
        folder: Path,
        destination: Path | None = None,
    ) -> list[Path]:
        """Write a patch of the script, or its flags, and a launch script."""
        return write_files(candidate, task, folder, self._script)
