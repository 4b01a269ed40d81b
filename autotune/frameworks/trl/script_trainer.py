"""Trainer of a user's own script: a TRL method, measured inside the script and recommended as a patch of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from autotune.core.candidate import Candidate
from autotune.core.dataset_lengths import PromptLengths, RowLengths
from autotune.core.probe_plan import ProbePlan
from autotune.core.task import Task
from autotune.core.user_script import UserScript
from autotune.frameworks.base import Trainer
from autotune.frameworks.trl import script_files


def script_trainer(inner: Trainer, script: UserScript) -> Trainer:
    """Return `inner` for a script of the user."""
    return cast("Trainer", _ScriptTrainer(inner, script))


class _ScriptTrainer:
    """TRL trainer inside a script of the user. Members that are not defined here are those of `inner`."""

    adapter = "trl.script_probe"

    def __init__(self, inner: Trainer, script: UserScript) -> None:
        self._inner, self._script = inner, script

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        """Return the inspected lengths. The number of rows within `limit` is exact to a percentile."""
        look = self._script.look
        if look.prompts is None or look.rows is None:
            return None
        percentiles = {int(share): length for share, length in look.prompts.items()}
        within = max((share for share, length in percentiles.items() if limit is None or length <= limit), default=0)
        return PromptLengths(rows=look.rows, kept=look.rows * within // 100, percentiles=percentiles)

    def row_lengths(self, task: Task) -> RowLengths | None:
        """Return None: the script prepares its own rows."""
        return None

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        script = self._script
        request = {
            "path": str(Path(script.path)),
            "arguments": list(script.arguments),
            "method": script.look.method,
            "gives_model": script.look.model.given,
            "rewards": script.rewards,
        }
        return {**self._inner.load_request(candidate, task), "script": request}

    def probe_request(self, candidate: Candidate, task: Task, plan: ProbePlan) -> Mapping[str, object]:
        return {**self._inner.probe_request(candidate, task, plan), "dataset": None, "reward_funcs": None}

    def write_files(self, candidate: Candidate, task: Task, folder: Path, destination: Path | None = None) -> list[Path]:
        """Write a patch of the script, or its flags, and a launch script."""
        return script_files.write_files(candidate, task, folder, self._script)
