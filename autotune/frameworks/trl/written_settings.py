"""Settings of a written TRL file that the user's own file does not have, or has otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.task import Task
from autotune.core.yaml_document import read_document
from autotune.frameworks.trl.installed_defaults import installed_defaults
from autotune.frameworks.trl.output_files import ACCELERATE_NAME
from autotune.frameworks.trl.settings import OWN_SETTINGS
from autotune.frameworks.trl.user_config import REPLACED, comparable

IN_ACCELERATE = frozenset({*REPLACED, "accelerate_config"})


@dataclass(frozen=True, kw_only=True)
class WrittenSetting:
    """One difference between the user's file and the written one."""

    name: str
    yours: object  # stated or TRL's default
    written: object
    kind: Literal["changed", "assumed", "moved"]
    """`changed`: trains otherwise; `assumed`: written out with the value that holds anyway; `moved`:
    now in accelerate.yaml."""


def written_settings(task: Task, path: Path) -> list[WrittenSetting]:
    """Compare the written file with the user's; all values are those that TRL's parser yields."""
    stated = task.workload.stated
    if task.workload.config_file is None or task.workload.script is not None or not stated:
        return []
    written = read_document(path).content
    defaults = installed_defaults(task.workload.python, task.workload.method)
    found = [
        _compared(str(name), value, stated, defaults)
        for name, value in written.items()
        if name not in stated or comparable(stated[name]) != comparable(value)
    ]
    missing = [name for name in stated if name not in written and name not in OWN_SETTINGS]
    return [*found, *(_left_out(name, stated[name], defaults) for name in missing)]


def _compared(name: str, value: object, stated: Mapping[str, object], defaults: Mapping[str, object]) -> WrittenSetting:
    yours = stated[name] if name in stated else defaults.get(name)
    known = name in stated or name in defaults
    same = known and comparable(yours) == comparable(value)
    return WrittenSetting(name=name, yours=yours, written=value, kind="assumed" if same else "changed")


def _left_out(name: str, yours: object, defaults: Mapping[str, object]) -> WrittenSetting:
    if name in IN_ACCELERATE:
        return WrittenSetting(name=name, yours=yours, written=ACCELERATE_NAME, kind="moved")
    return WrittenSetting(name=name, yours=yours, written=defaults.get(name), kind="changed")
