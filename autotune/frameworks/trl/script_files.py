"""Winner for a user's own script: recommended.patch, or flags if the script accepts them, and launch.sh."""

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
from autotune.frameworks.trl.accelerate_files import launch_configuration
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.launch_script import exports, finder_of
from autotune.frameworks.trl.output_files import ACCELERATE_NAME, LAUNCH_NAME, SHIM_NAME, YAML_NAME, write, write_shim
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.settings import GENERATION_SHAPE, OWN_SETTINGS
from autotune.frameworks.trl.source_patch import Call, patch_file
from autotune.frameworks.trl.topology import nested, ranks_of

PATCH_NAME = "recommended.patch"
IN_OBJECTS = frozenset({"dtype", "attn_implementation", "load_in_4bit", "load_in_8bit", "use_peft", "lora_r", "lora_alpha"})
"""Settings in objects of the script: `model_init_kwargs`, `from_pretrained`, `peft_config`."""

CLASS_PREFIXES: Mapping[str, str] = {"reward": "Reward", "async-grpo": "AsyncGRPO"}
"""Method -> beginning of its classes' names; the default is the method in capitals."""


@dataclass(frozen=True, kw_only=True)
class ScriptAdvice:
    """Changes of a script, and how to make them."""

    changes: Mapping[str, KnobValue]  # keyword arguments of the configuration -> new value
    patch: str = ""  # unified diff; empty if nothing changes, or nothing can be patched
    patched_file: str | None = None
    by_hand: Mapping[str, str] = field(default_factory=dict)  # change that the patch lacks -> reason
    flags: tuple[str, ...] = ()  # changes as command-line flags, if the script accepts them
    in_objects: Mapping[str, KnobValue] = field(default_factory=dict)  # changes in the script's own model or adapter

    @property
    def keyword_arguments(self) -> str:
        """Changes as source code."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


def advice_for(candidate: Candidate, task: Task, script: UserScript) -> ScriptAdvice:
    """Return the changes that turn the script into the measured candidate."""
    look, held = script.look, task.workload.held
    changes, place = _changes(candidate, task, script), look.config_place
    in_objects = {
        name: value for name, value in candidate.settings.items() if name in IN_OBJECTS and _differs(held.get(name), value)
    }
    # 1. Flags, as TRL's parsers read them.
    flags = tuple(word for name, value in changes.items() for word in (f"--{name}", as_word(value))) if script.takes_flags else ()
    if flags or not changes:
        return ScriptAdvice(changes=changes, flags=flags, in_objects=in_objects)
    # 2. No call that could be patched.
    if place is None or place.maker or not Path(place.file).is_file():
        why = (
            f"{place.maker} makes the configuration" if place and place.maker else f"the script makes no {_config_class(script)}"
        )
        return ScriptAdvice(changes=changes, by_hand=dict.fromkeys(changes, why), in_objects=in_objects)
    # 3. Patch.
    call = Call(line=place.line, span=place.span, expanded=look.expanded, changed=look.changed)
    diff, by_hand = patch_file(Path(place.file), call, changes)
    return ScriptAdvice(
        changes=changes, patch=diff, patched_file=place.file if diff else None, by_hand=by_hand, in_objects=in_objects
    )


def _config_class(script: UserScript) -> str:
    method = script.look.method
    return f"{CLASS_PREFIXES.get(method, method.upper())}Config"


def _changes(candidate: Candidate, task: Task, script: UserScript) -> dict[str, KnobValue]:
    """Return the configuration settings that differ between candidate and script."""
    raw, known = script.look.raw, fields(script.look.method)
    changes = {
        name: value
        for name, value in candidate.settings.items()
        if _in_config(name, script) and name not in OWN_SETTINGS and name not in GENERATION_SHAPE
        and not name.startswith(SIDE_EFFECTS) and raw.get(name, known[name].default) != value
    }  # fmt: skip
    if raw.get("bf16") is None and not raw.get("fp16") and changes.get("bf16") is True:
        del changes["bf16"]  # the framework's own default
    return {**changes, **_generation_shape(candidate, task, raw)}


def _generation_shape(candidate: Candidate, task: Task, raw: Mapping[str, object]) -> dict[str, KnobValue]:
    """Return the generation batch in the script's own setting; none if it follows from the others."""
    settings = candidate.settings
    steps, micro = settings.get("steps_per_generation"), settings.get("per_device_train_batch_size")
    if not isinstance(steps, int) or not isinstance(micro, int):
        return {}
    if raw.get("generation_batch_size") is not None:
        batch = micro * ranks_of(settings, task.hardware.count) * steps
        return {} if batch == raw["generation_batch_size"] else {"generation_batch_size": batch}
    derived = raw.get("steps_per_generation") is None and steps == settings.get("gradient_accumulation_steps")
    return {} if derived or raw.get("steps_per_generation") == steps else {"steps_per_generation": steps}


def _differs(before: object, value: KnobValue) -> bool:
    return value != before and not (before is None and value in (False, None))


def _in_config(name: str, script: UserScript) -> bool:
    known = fields(script.look.method)
    return name in known and known[name].owner == "config"


def write_files(candidate: Candidate, task: Task, folder: Path, script: UserScript) -> list[Path]:
    """Write the files of the final run besides the script itself."""
    folder.mkdir(parents=True, exist_ok=True)
    advice = advice_for(candidate, task, script)
    written = [write(folder / YAML_NAME, _yaml(candidate, task, script, advice))]
    written.append(write(folder / ACCELERATE_NAME, yaml.safe_dump(launch_configuration(candidate, task), sort_keys=False)))
    if advice.patch:
        written.append(write(folder / PATCH_NAME, advice.patch))
    if shim := task.hardware.kind == "cpu" and bool(candidate.settings.get("use_vllm")):
        written += write_shim(folder)
    launch = _launch(candidate, task, script, advice, shim=SHIM_NAME if shim else None)
    return [*written, write(folder / LAUNCH_NAME, launch, executable=True)]


def how_to_apply(advice: ScriptAdvice, folder: str = ".") -> list[str]:
    """Return the instructions to apply the recommendation, one sentence each."""
    lines = []
    if advice.flags:
        lines.append(f"Give them to the script: {shlex.join(advice.flags)}")
    if advice.patched_file:
        root = shlex.quote(str(Path(advice.patched_file).parent))
        lines.append(f"Change the script with: patch -p1 -d {root} < {shlex.quote(f'{folder}/{PATCH_NAME}')}")
    lines += [f"By hand: {name}={advice.changes[name]!r}, because {why}" for name, why in advice.by_hand.items()]
    lines += [f"By hand: {name}={value!r}, in the script's own model or adapter" for name, value in advice.in_objects.items()]
    return lines or ["The script is as recommended already."]


def _yaml(candidate: Candidate, task: Task, script: UserScript, advice: ScriptAdvice) -> str:
    """Return the configuration's settings, for reading and for `--config`."""
    place = script.look.config_place
    rewards = "not called" if script.rewards == "skip" else "as the script gives them"
    source = f" ({place})" if place else ""
    head = [
        f"Settings of {_config_class(script)}{source}: {script.look.trainer} of {script.path} on {task.hardware}.",
        f"Measured with rewards {rewards}.",
        *how_to_apply(advice),
    ]
    tuned = {**advice.changes, **{name: value for name, value in candidate.knobs.items() if _in_config(name, script)}}
    whole = {**tuned, **nested(candidate.settings, {})}
    return comments(head) + yaml.safe_dump({name: value for name, value in whole.items() if value is not None}, sort_keys=False)


def _launch(candidate: Candidate, task: Task, script: UserScript, advice: ScriptAdvice, *, shim: str | None) -> str:
    """Return the launch script. It refuses to start a script without the recommended patch."""
    words = shlex.join([*script.arguments, *advice.flags])
    path = shlex.quote(str(Path(script.path).absolute()))
    further = f"Further arguments go to the script: ./{LAUNCH_NAME} --resume"
    head = comment(f"Starts {Path(script.path).name} as it was measured. {further}")
    check = ""
    if advice.patched_file:
        root = shlex.quote(str(Path(advice.patched_file).parent))
        advised = shlex.quote(f"The script is not changed yet: patch -p1 -d {root} < ")
        check = f"""if ! patch -p1 -R -s -f --dry-run -d {root} <"$here/{PATCH_NAME}" >/dev/null; then
  printf '%s%q\\n' {advised} "$here/{PATCH_NAME}" >&2
  exit 2
fi
"""
    return f"""#!/usr/bin/env bash
{head}set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{check}{finder_of("accelerate")}{exports(candidate, task, shim)}cd {shlex.quote(str(Path.cwd()))}
exec "$accelerate" launch --config_file "$here/{ACCELERATE_NAME}" {path} {words} "$@"
"""
