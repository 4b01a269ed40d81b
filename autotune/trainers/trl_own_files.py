"""The winner for a user's own script: recommended.patch, or flags where the script takes them, and what starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from autotune.candidate import Candidate, KnobValue
from autotune.files import put_whole
from autotune.own_script import OwnScript
from autotune.trainers.base import Job
from autotune.trainers.trl_fields import Field, fields
from autotune.trainers.trl_files import SHIM, SHIM_NAME
from autotune.trainers.trl_launch import launch_configuration
from autotune.trainers.trl_patch import Call, patch_file
from autotune.trainers.trl_requests import SIDE_EFFECTS
from autotune.trainers.trl_settings import GENERATION_SHAPE, OWN_SETTINGS
from autotune.trainers.trl_topology import environment_of, nested, ranks_of

PATCH_NAME, YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME = "recommended.patch", "recommended.yaml", "accelerate.yaml", "launch.sh"
IN_OBJECTS = frozenset({"dtype", "attn_implementation", "load_in_4bit", "load_in_8bit", "use_peft", "lora_r", "lora_alpha"})
"""What a script says in objects of its own: `model_init_kwargs`, `from_pretrained`, `peft_config`."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to change in the script, and how it can be done."""

    changes: Mapping[str, KnobValue]
    """Keyword arguments of its configuration that are to be others."""

    patch: str = ""
    """A unified diff; empty where nothing is to change, or nothing can be changed so."""

    patched_file: str | None = None
    by_hand: Mapping[str, str] = field(default_factory=dict)
    """Changes that are not in the patch -> why."""

    flags: tuple[str, ...] = ()
    """The changes as command-line flags, where the script takes them."""

    in_objects: Mapping[str, KnobValue] = field(default_factory=dict)
    """What is to change in the model or its adapter, which are objects of the script's."""

    @property
    def keyword_arguments(self) -> str:
        """The changes to paste."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


def advice_for(candidate: Candidate, job: Job, script: OwnScript) -> Advice:
    """How the script becomes what was measured."""
    known = fields(script.look.method)
    changes, look = _changes(candidate, job, script, known), script.look
    place, flags = look.config_place, _flags(changes) if script.takes_flags else ()
    in_objects = {name: value for name, value in candidate.settings.items() if name in IN_OBJECTS and _differs(name, value, job)}
    if flags or not changes:
        return Advice(changes=changes, flags=flags, in_objects=in_objects)
    if place is None or place.maker or not Path(place.file).is_file():
        why = f"{place.maker} makes the configuration" if place and place.maker else f"the script makes no {known_config(script)}"
        return Advice(changes=changes, by_hand=dict.fromkeys(changes, why), in_objects=in_objects)
    call = Call(line=place.line, span=place.span, expanded=look.expanded, changed=look.changed)
    diff, by_hand = patch_file(Path(place.file), call, changes)
    return Advice(changes=changes, patch=diff, patched_file=place.file if diff else None, by_hand=by_hand, in_objects=in_objects)


def known_config(script: OwnScript) -> str:
    return f"{script.look.method.upper()}Config"


def _changes(candidate: Candidate, job: Job, script: OwnScript, known: Mapping[str, Field]) -> dict[str, KnobValue]:
    """Settings of the configuration in which the candidate is unlike the script."""
    raw, settings = script.look.raw, candidate.settings
    plain = {
        name: value
        for name, value in settings.items()
        if name in known and known[name].owner == "config" and name not in OWN_SETTINGS and name not in GENERATION_SHAPE
        and not name.startswith(SIDE_EFFECTS)
    }  # fmt: skip
    unlike = {name: value for name, value in plain.items() if _said(raw, name, known) != value}
    if raw.get("bf16") is None and not raw.get("fp16") and unlike.get("bf16") is True:
        del unlike["bf16"]  # so the framework completes it by itself
    return {**unlike, **_generation_shape(candidate, job, script)}


def _said(raw: Mapping[str, object], name: str, known: Mapping[str, Field]) -> object:
    return raw.get(name, known[name].default)


def _generation_shape(candidate: Candidate, job: Job, script: OwnScript) -> dict[str, KnobValue]:
    """In the word that the script uses; in none where it is what follows from the rest."""
    steps, raw = candidate.settings.get("steps_per_generation"), script.look.raw
    micro = candidate.settings.get("per_device_train_batch_size")
    if not isinstance(steps, int) or not isinstance(micro, int):
        return {}
    if raw.get("generation_batch_size") is not None:
        batch = micro * ranks_of(candidate.settings, job.hardware.count) * steps
        return {} if batch == raw["generation_batch_size"] else {"generation_batch_size": batch}
    follows = raw.get("steps_per_generation") is None and steps == candidate.settings.get("gradient_accumulation_steps")
    return {} if follows or raw.get("steps_per_generation") == steps else {"steps_per_generation": steps}


def _differs(name: str, value: KnobValue, job: Job) -> bool:
    was = job.workload.held.get(name)
    return value != was and not (was is None and value in (False, None))


def _flags(changes: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """As TRL's parsers read them."""
    return tuple(word for name, value in changes.items() for word in (f"--{name}", _word(value)))


def _word(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_files(candidate: Candidate, job: Job, folder: Path, script: OwnScript, known: Mapping[str, Field]) -> list[Path]:
    """Everything that the final run needs beside the script itself."""
    folder.mkdir(parents=True, exist_ok=True)
    advice = advice_for(candidate, job, script)
    written = [_write(folder / YAML_NAME, _yaml(candidate, job, script, advice))]
    written.append(_write(folder / ACCELERATE_NAME, yaml.safe_dump(launch_configuration(candidate, job), sort_keys=False)))
    if advice.patch:
        written.append(_write(folder / PATCH_NAME, advice.patch))
    shim = job.hardware.kind == "cpu" and bool(candidate.settings.get("use_vllm"))
    if shim:
        (folder / SHIM_NAME).mkdir(exist_ok=True)
        written.append(_write(folder / SHIM_NAME / "sitecustomize.py", SHIM.read_text(encoding="utf-8")))
    launch = _write(folder / LAUNCH_NAME, _launch(candidate, job, script, advice, shim=shim))
    launch.chmod(launch.stat().st_mode | 0o111)
    return [*written, launch]


def _write(path: Path, text: str) -> Path:
    put_whole(path, text.encode())
    return path


def how_to_apply(script: OwnScript, advice: Advice, folder: str = ".") -> list[str]:
    """What to do with the recommendation, a sentence each."""
    lines = []
    if advice.flags:
        lines.append(f"Give them to the script: {shlex.join(advice.flags)}")
    if advice.patched_file:
        root = shlex.quote(str(Path(advice.patched_file).parent))
        lines.append(f"Change the script with: patch -p1 -d {root} < {folder}/{PATCH_NAME}")
    lines += [f"By hand: {name}={advice.changes[name]!r}, because {why}" for name, why in advice.by_hand.items()]
    for name, value in advice.in_objects.items():
        lines.append(f"By hand: {name}={value!r}, in the script's own model or adapter")
    return lines or ["The script is as recommended already."]


def _yaml(candidate: Candidate, job: Job, script: OwnScript, advice: Advice) -> str:
    """The configuration's settings by name: for reading, and for `--config` where the script takes it."""
    place = script.look.config_place
    head = [
        f"{script.look.trainer} of {script.path} on {job.hardware}: what its {known_config(script)} is to have"
        + (f" ({place})." if place else "."),
        f"Measured with rewards {'not called' if script.rewards == 'skip' else 'as the script gives them'}.",
        *how_to_apply(script, advice),
    ]
    tuned = {**advice.changes, **{name: value for name, value in candidate.knobs.items() if _of_config(name, script)}}
    whole = {**tuned, **nested(candidate.settings, {})}
    text = "".join(f"# {line}\n" for line in head)
    return text + yaml.safe_dump({name: value for name, value in whole.items() if value is not None}, sort_keys=False)


def _of_config(name: str, script: OwnScript) -> bool:
    known = fields(script.look.method)
    return name in known and known[name].owner == "config"


def _launch(candidate: Candidate, job: Job, script: OwnScript, advice: Advice, *, shim: bool) -> str:
    """Starts the script as it was measured; refuses to start an unpatched one under a recommendation's name."""
    accelerate = shlex.quote(str(job.workload.python.parent / "accelerate"))
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in environment_of(candidate.settings).items()]
    if shim:
        exports.append(f'export PYTHONPATH="$here/{SHIM_NAME}${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    words = shlex.join([*script.arguments, *advice.flags])
    path = shlex.quote(str(Path(script.path).absolute()))
    return f"""#!/usr/bin/env bash
# Starts {Path(script.path).name} as it was measured. Further arguments go to the script: ./{LAUNCH_NAME} --resume
set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
accelerate={accelerate}
[ -x "$accelerate" ] || accelerate=accelerate
{_check(advice)}{"".join(exports)}cd {shlex.quote(str(Path.cwd()))}
exec "$accelerate" launch --config_file "$here/{ACCELERATE_NAME}" {path} {words} "$@"
"""


def _check(advice: Advice) -> str:
    if not advice.patched_file:
        return ""
    root = shlex.quote(str(Path(advice.patched_file).parent))
    return f"""if ! patch -p1 -R -s -f --dry-run -d {root} <"$here/{PATCH_NAME}" >/dev/null; then
  echo "The script is not changed yet: patch -p1 -d {root} < $here/{PATCH_NAME}" >&2
  exit 2
fi
"""
