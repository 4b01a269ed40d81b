"""Winner for a user's own script: recommended.patch, or flags if the script accepts them, and
launch.sh.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from autotune.core.files import comment, comments
from autotune.core.job import Task
from autotune.core.space import Candidate, KnobValue
from autotune.core.user_script import UserScript
from autotune.frameworks.base import as_word
from autotune.frameworks.trl.class_names import CLASS_PREFIXES, EXPERIMENTAL_PREFIXES
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.launch_files import exports, finder_of
from autotune.frameworks.trl.output_data import generation_batch
from autotune.frameworks.trl.output_files import (
    ACCELERATE_NAME,
    LAUNCH_NAME,
    SHIM_NAME,
    YAML_NAME,
    write,
    write_launch_configuration,
    write_shim,
)
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.script_patch import Call, patch_file
from autotune.frameworks.trl.settings import GENERATION_SHAPE, OWN_SETTINGS, nested

PATCH_NAME = "recommended.patch"
IN_OBJECTS = frozenset(
    {
        "dtype",
        "attn_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "use_peft",
        "lora_r",
        "lora_alpha",
    }
)
"""Settings in objects of the script: `model_init_kwargs`, `from_pretrained`, `peft_config`."""


@dataclass(frozen=True, kw_only=True)
class ScriptAdvice:
    """Changes of a script, and how to make them."""

    changes: Mapping[str, KnobValue]  # keyword arguments of the configuration -> new value
    patch: str = ""  # unified diff; empty if nothing changes, or nothing can be patched
    patched_file: str | None = None
    by_hand: Mapping[str, str] = field(default_factory=dict)  # change without a patch -> reason
    flags: tuple[str, ...] = ()  # changes as command-line flags, if the script accepts them
    # Changes in the script's own model or adapter
    in_objects: Mapping[str, KnobValue] = field(default_factory=dict)

    @property
    def keyword_arguments(self) -> str:
        """Changes as source code."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


# 1. Changes of the script.


def advice_for(
    candidate: Candidate,
    task: Task,
    script: UserScript,
) -> ScriptAdvice:
    """Return the changes that turn the script into the measured candidate."""
    changes = _changes(candidate, task, script)
    in_objects = _changes_in_objects(candidate, task)
    # 1. Flags, as TRL's parsers read them.
    if script.takes_flags or not changes:
        flags: list[str] = []
        for name, value in changes.items():
            flags += [f"--{name}", as_word(value)]
        return ScriptAdvice(
            changes=changes,
            flags=tuple(flags),
            in_objects=in_objects,
        )
    # 2. No call that could be patched.
    place = script.look.config_place
    if place is None or place.maker or not Path(place.file).is_file():
        reason = f"the script makes no {_config_class(script)}"
        if place is not None and place.maker:
            reason = f"{place.maker} makes the configuration"
        by_hand = dict.fromkeys(changes, reason)
        return ScriptAdvice(
            changes=changes,
            by_hand=by_hand,
            in_objects=in_objects,
        )
    # 3. Patch.
    call = Call(
        line=place.line,
        span=place.span,
        expanded=script.look.expanded,
        changed=script.look.changed,
    )
    diff, obstacles = patch_file(Path(place.file), call, changes)
    return ScriptAdvice(
        changes=changes,
        patch=diff,
        patched_file=place.file if diff else None,
        by_hand=obstacles,
        in_objects=in_objects,
    )


def _changes(
    candidate: Candidate,
    task: Task,
    script: UserScript,
) -> dict[str, KnobValue]:
    """Return the configuration settings that differ between candidate and script."""
    current = script.look.raw
    accepted = fields(script.look.method)
    changes: dict[str, KnobValue] = {}
    for name, value in candidate.settings.items():
        if not _in_config(name, script) or name.startswith(SIDE_EFFECTS):
            continue
        if name in OWN_SETTINGS or name in GENERATION_SHAPE:
            continue
        if current.get(name, accepted[name].default) != value:
            changes[name] = value
    computes_in_bf16 = current.get("bf16") is None and not current.get("fp16")  # by default
    if computes_in_bf16 and changes.get("bf16") is True:
        del changes["bf16"]
    return {**changes, **_generation_shape(candidate, task, current)}


def _in_config(name: str, script: UserScript) -> bool:
    accepted = fields(script.look.method)
    return name in accepted and accepted[name].owner == "config"


def _generation_shape(
    candidate: Candidate,
    task: Task,
    current: Mapping[str, object],
) -> dict[str, KnobValue]:
    """Return the generation batch in the script's own setting; none if it is derived from the
    others.
    """
    settings = candidate.settings
    steps = settings.get("steps_per_generation")
    micro = settings.get("per_device_train_batch_size")
    if not isinstance(steps, int) or not isinstance(micro, int):
        return {}
    name = "steps_per_generation"
    value = steps
    if current.get("generation_batch_size") is not None:
        name = "generation_batch_size"
        value = generation_batch(candidate, task)
    current_value = current.get(name)
    if current_value is None:
        current_value = settings.get("gradient_accumulation_steps")
    return {} if current_value == value else {name: value}


def _changes_in_objects(candidate: Candidate, task: Task) -> dict[str, KnobValue]:
    """Return the settings of model and adapter that differ between candidate and script."""
    changes: dict[str, KnobValue] = {}
    for name, value in candidate.settings.items():
        if name not in IN_OBJECTS:
            continue
        current = task.workload.held_values.get(name)
        is_off = current is None and value in (False, None)
        if value != current and not is_off:
            changes[name] = value
    return changes


def _config_class(script: UserScript) -> str:
    method = script.look.method
    prefixes = {**CLASS_PREFIXES, **EXPERIMENTAL_PREFIXES}
    return f"{prefixes[method]}Config"


def how_to_apply(advice: ScriptAdvice, folder: str = ".") -> list[str]:
    """Return the instructions to apply the recommendation, one sentence each."""
    lines = []
    if advice.flags:
        lines.append(f"Give them to the script: {shlex.join(advice.flags)}")
    if advice.patched_file:
        patch = shlex.quote(f"{folder}/{PATCH_NAME}")
        lines.append(f"Change the script with: {_patch_command(advice.patched_file)} < {patch}")
    for name, reason in advice.by_hand.items():
        lines.append(f"By hand: {name}={advice.changes[name]!r}, because {reason}")
    for name, value in advice.in_objects.items():
        lines.append(f"By hand: {name}={value!r}, in the script's own model or adapter")
    return lines or ["The script is as recommended already."]


def _patch_command(file: str) -> str:
    return f"patch -p1 -d {shlex.quote(str(Path(file).parent))}"


# 2. Written files.


def write_files(
    candidate: Candidate,
    task: Task,
    folder: Path,
    script: UserScript,
) -> list[Path]:
    """Write the files of the final run besides the script itself."""
    folder.mkdir(parents=True, exist_ok=True)
    advice = advice_for(candidate, task, script)
    paths = [
        write(folder / YAML_NAME, _yaml(candidate, task, script, advice)),
        write_launch_configuration(folder, candidate, task),
    ]
    if advice.patch:
        paths.append(write(folder / PATCH_NAME, advice.patch))
    shim = write_shim(folder, candidate, task)
    paths += shim
    launch = _launch(candidate, task, script, advice, shim=SHIM_NAME if shim else None)
    paths.append(write(folder / LAUNCH_NAME, launch, executable=True))
    return paths


def _yaml(
    candidate: Candidate,
    task: Task,
    script: UserScript,
    advice: ScriptAdvice,
) -> str:
    """Return the configuration's settings, for reading and for `--config`."""
    place = script.look.config_place
    source = f" ({place})" if place else ""
    rewards = "not called" if script.rewards == "skip" else "as the script gives them"
    trainer = f"{script.look.trainer} of {script.path} on {task.hardware}"
    head = [
        f"Settings of {_config_class(script)}{source}: {trainer}.",
        f"Measured with rewards {rewards}.",
        *how_to_apply(advice),
    ]
    settings: dict[str, object] = dict(advice.changes)
    for name, value in candidate.knobs.items():
        if _in_config(name, script):
            settings[name] = value
    settings |= nested(candidate.settings, {})
    stated = {name: value for name, value in settings.items() if value is not None}
    return comments(head) + yaml.safe_dump(stated, sort_keys=False)


def _launch(
    candidate: Candidate,
    task: Task,
    script: UserScript,
    advice: ScriptAdvice,
    *,
    shim: str | None,
) -> str:
    """Return the launch script. It refuses to start a script without the recommended patch."""
    path = Path(script.path)
    head = comment(
        f"Starts {path.name} as it was measured. Further arguments go to the script:"
        f" ./{LAUNCH_NAME} --resume"
    )
    command = (
        f"{shlex.quote(str(path.absolute()))} {shlex.join([*script.arguments, *advice.flags])}"
    )
    check = _patch_check(advice.patched_file) if advice.patched_file else ""
    return f"""#!/usr/bin/env bash
{head}set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{check}{finder_of("accelerate")}{exports(candidate, task, shim)}cd {shlex.quote(str(Path.cwd()))}
exec "$accelerate" launch --config_file "$here/{ACCELERATE_NAME}" {command} "$@"
"""


def _patch_check(file: str) -> str:
    """Return the lines that end with status 2 unless the patch has been applied."""
    root = shlex.quote(str(Path(file).parent))
    advised = shlex.quote(f"The script is not changed yet: {_patch_command(file)} < ")
    return f"""if ! patch -p1 -R -s -f --dry-run -d {root} <"$here/{PATCH_NAME}" >/dev/null; then
  printf '%s%q\\n' {advised} "$here/{PATCH_NAME}" >&2
  exit 2
fi
"""
