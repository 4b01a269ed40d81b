"""Comparison of the written YAML with the user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.job import Task
from autotune.core.yaml_document import read_document
from autotune.frameworks.trl.config_launch_files import comparable
from autotune.frameworks.trl.field_list import installed_defaults
from autotune.frameworks.trl.output_files import ACCELERATE_NAME
from autotune.frameworks.trl.settings import OWN_SETTINGS
from autotune.frameworks.trl.user_config import REPLACED


@dataclass(frozen=True, kw_only=True)
class WrittenSetting:
    """Difference between the user's file and the written one."""

    name: str
    yours: object  # stated or TRL's default
    written: object
    kind: Literal["changed", "assumed", "moved"]
    """`changed`: trains otherwise; `assumed`: written out with the value that holds anyway;
    `moved`: now in accelerate.yaml.
    """


def written_settings(task: Task, path: Path) -> list[WrittenSetting]:
    """Compare the written file with the user's; all values are those that TRL's parser yields."""
    stated = task.workload.stated
    if task.workload.config_file is None or task.workload.script is not None or not stated:
        return []
    written = read_document(path).content
    defaults = installed_defaults(task.workload.python, task.workload.method)
    differences: list[WrittenSetting] = []
    # 1. Written settings.
    for name, value in written.items():
        yours = stated[name] if name in stated else defaults.get(name)
        is_known = name in stated or name in defaults
        is_same = is_known and comparable(yours) == comparable(value)
        if is_same and name in stated:
            continue
        difference = WrittenSetting(
            name=str(name),
            yours=yours,
            written=value,
            kind="assumed" if is_same else "changed",
        )
        differences.append(difference)
    # 2. Those that were left out.
    for name, yours in stated.items():
        if name in written or name in OWN_SETTINGS:
            continue
        if name in REPLACED:
            difference = WrittenSetting(
                name=name,
                yours=yours,
                written=ACCELERATE_NAME,
                kind="moved",
            )
        else:
            difference = WrittenSetting(
                name=name,
                yours=yours,
                written=defaults.get(name),
                kind="changed",
            )
        differences.append(difference)
    return differences
