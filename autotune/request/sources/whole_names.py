"""Options of a command whose names are cut short: argparse takes `--zero` for `--zero_stage`."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.user_script import LaunchScript, StatedSetting
from autotune.frameworks.base import Trainer
from autotune.frameworks.launch_kinds import LaunchKind


def with_whole_names(
    launch: LaunchScript,
    kind: LaunchKind,
    trainer: Trainer,
) -> LaunchScript:
    """Return the launch with the names of the options that the framework's parser would find."""
    if kind.dotted or kind.files is not None or launch.framework == "trl":
        return launch
    names = {
        *trainer.fields(),
        *trainer.known_names,
        *kind.former,
    }
    stated: dict[str, StatedSetting] = {}
    written = set(launch.written)
    notes: list[str] = []
    for name, setting in launch.stated.items():
        whole_name = _whole_name(name, names)
        if name in names or whole_name is None:
            stated[name] = setting
            continue
        present_name = kind.former.get(whole_name, whole_name)
        stated[present_name] = replace(
            setting,
            option=None,
            span=None,
        )
        place = f"--{name} (line {setting.line})"
        notes.append(f"{place} is --{whole_name}, cut short")
        written.add(whole_name)
    return replace(
        launch,
        stated=stated,
        written=frozenset(written),
        assumed=(*launch.assumed, *notes),
    )


def _whole_name(beginning: str, names: set[str]) -> str | None:
    """Return the one name with this beginning; of several, the parser takes none."""
    candidates = [name for name in names if name.startswith(beginning)]
    if len(candidates) != 1:
        return None
    return candidates[0]
