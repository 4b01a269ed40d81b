"""The user's own script: every setting of a launch script (`--from-command`) or of a training
script (`--script`) becomes the baseline.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune import frameworks
from autotune.catalog import model_lookup
from autotune.core.errors import BadInput
from autotune.core.files import read_text
from autotune.core.job import Hardware, Model
from autotune.core.shell_script import commands_of
from autotune.core.space import KnobValue
from autotune.core.units import MIB
from autotune.core.user_script import LaunchScript, ScriptInspection, StatedSetting, UserScript
from autotune.core.yaml_document import Document, KeyPath, read_document
from autotune.frameworks.base import Field, Trainer
from autotune.frameworks.configuration_files import why_unread
from autotune.frameworks.launch_commands import find_launch, is_known, kind_of, stated_value
from autotune.frameworks.trl import async_grpo
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.script_inspection import look_at
from autotune.frameworks.trl.script_trainer import script_trainer
from autotune.frameworks.trl.settings import ALWAYS_STATED, DEFAULT_PROMPT_LENGTH, VLLM_SETTINGS
from autotune.frameworks.trl.user_config import TRAINED, UserConfig, split_document
from autotune.machine import environment
from autotune.request.flags import Flags

MAX_SCRIPT_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class ParsedScript:
    """The user's own script, and its settings as a configuration."""

    flags: Flags  # with what the script itself states
    config: UserConfig
    launch: LaunchScript | None = None  # of `--from-command`
    script: UserScript | None = None  # of `--script`
    trainer: Trainer
    model: Model | None = None  # of `--script`


def read_launch(flags: Flags) -> ParsedScript:
    """Read the script of `--from-command`."""
    for name in ("config", "script"):
        if getattr(flags, name) is not None:
            raise BadInput(
                f"--{name} and --from-command can't both define what is trained.",
                way_out=f"Leave --{name} out.",
            )
    path = str(flags.from_command)
    text = read_text(
        Path(path).expanduser(),
        largest_bytes=MAX_SCRIPT_BYTES,
        way_out="Give the shell script that starts the training.",
    )
    script = find_launch(path, text, commands_of(text, flags.arguments, os.environ))
    trainer = frameworks.trainer(script.framework, script.method)
    config = (
        _trl_config(script, trainer)
        if script.framework == "trl"
        else _launch_config(script, trainer)
    )
    # The script's framework, method, model and tuning, where they are not given.
    named = script.stated.get(kind_of(script.framework).model)
    model = config.model or (named.text if named is not None and is_known(named) else None)
    changes: dict[str, Any] = {
        "framework": script.framework,
        "method": script.method,
        "arguments": (),
    }
    if flags.model is None and model:
        changes["model"] = model
    if flags.tuning is None and script.framework != "trl":
        changes["tuning"] = _tuning(script)
    return ParsedScript(
        flags=flags.replace(**changes), config=config, launch=script, trainer=trainer
    )


def _tuning(script: LaunchScript) -> str:
    kind = kind_of(script.framework)
    if kind.tuner is not None:
        stated = script.stated.get(kind.tuner)
        named = stated.text if stated is not None else "lora"
        quantised = script.stated.get("quant_bits")
        return (
            "full"
            if named == "full"
            else "qlora"
            if quantised is not None and quantised.text == "4"
            else "lora"
        )
    rank = script.stated.get(kind.adapter or "")
    return "lora" if rank is not None and rank.text not in (None, "0") else "full"


def _launch_config(script: LaunchScript, trainer: Trainer) -> UserConfig:
    """Return the settings that the framework's table has; the others stay in the script."""
    kind = kind_of(script.framework)
    own = (
        trainer.canonical.keys() & set(kind.former.values()) - trainer.fields().keys()
    )  # earlier releases had flags for them
    known = {**trainer.fields(), **{name: Field(kinds=("int",), default=None) for name in own}}
    settings: dict[str, KnobValue] = {}
    kept: list[str] = []
    wrong: list[str] = []
    for name, stated in script.stated.items():
        if (
            kind.files is not None
            and (why := why_unread(kind.files, name, stated.text, known)) is not None
        ):
            raise BadInput(
                f"{script.path}, line {stated.line}: {why}.",
                way_out="Leave it out, or use --framework command.",
            )
        if name in kind.follows_hardware or name == kind.model:
            continue
        if name not in known or name.startswith(kind.kept):
            kept.append(name)
        elif not is_known(stated):
            wrong.append(f"line {stated.line}: {name} is the output of a command, which is not run")
        else:
            value = stated_value(stated, known[name])
            if value is not None or "null" in known[name].kinds:
                settings[name] = value
    if wrong:
        raise BadInput(
            f"{script.path}: {'; '.join(wrong)}.",
            way_out="Write its value, or give it with --hold NAME=VALUE.",
        )
    notes = [
        (
            f"read from {script.path}, line {script.line}: {len(settings)} settings of"
            f" {script.framework} {script.method}"
        )
    ]
    if script.former:
        today = ", ".join(trainer.requires.values())
        notes.append(
            f"flags of an earlier {script.framework} are read as those of {today}, which is"
            " modelled"
        )
    if kept:
        notes.append(f"kept in the script, and not considered: {', '.join(kept)}")
    return UserConfig(path=Path(script.path), settings=settings, rest={}, notes=tuple(notes))


def _trl_config(script: LaunchScript, trainer: Trainer) -> UserConfig:
    """Return the settings of the YAML file behind `--config`, overridden by the command line."""
    known = trainer.fields()
    content: dict[str, object] = {}
    places: dict[KeyPath, tuple[int, int]] = {}
    file = script.stated.get("config")
    path = Path(script.path)
    if file is not None and file.text:
        path = _beside(script, file.text)
        inner = read_document(path)
        content |= {str(name): value for name, value in inner.content.items()}
        places |= inner.places
    for name, stated in script.stated.items():
        if name == "config" or (name in _LAUNCHER_ONLY and name not in known):
            continue
        if not is_known(stated):
            if name.startswith(SIDE_EFFECTS):
                continue
            raise BadInput(
                f"{script.path}, line {stated.line}: {name} is the output of a command, which is"
                " not run.",
                way_out=f"Write its value, or give it with --hold {name}=VALUE.",
            )
        content[name] = _trl_value(stated, known.get(name))
        places[(name,)] = (stated.line, 1)
    if "config_file" in content:
        content["accelerate_config"] = str(_beside(script, str(content.pop("config_file"))))
        places[("accelerate_config",)] = places.get(("config_file",), (1, 1))
    return split_document(Document(path=path, content=content, places=places), script.method)


_LAUNCHER_ONLY = frozenset(
    {
        "main_process_port",
        "main_process_ip",
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "standalone",
        "num_cpu_threads_per_process",
        "include",
        "num_gpus",
        "use_deepspeed",
    }
)


def _trl_value(stated: StatedSetting, field: Field | None) -> object:
    if stated.text is None:
        return True
    kinds: tuple[str, ...] = () if field is None else field.kinds
    if "list" in kinds:
        return [yaml.safe_load(word) for word in stated.text.split()]
    try:
        value: object = yaml.safe_load(stated.text)
    except yaml.YAMLError:
        value = stated.text
    return (
        stated.text
        if "str" in kinds
        and not isinstance(value, dict | list | bool | None)
        and "float" not in kinds
        else value
    )


def _beside(script: LaunchScript, name: str) -> Path:
    path = Path(name).expanduser()
    beside = Path(script.path).parent / path
    return beside if not path.is_absolute() and not path.is_file() and beside.is_file() else path


SCRIPT_FLAGS = ("model", "config", "dataset", "tuning")  # flags whose values the script contains
PROMPTED = (
    "grpo",
    "rloo",
    async_grpo.ASYNC_METHOD,
)  # methods of scripts that generate completions to prompts
HELD = (
    *ALWAYS_STATED["grpo"],
    *ALWAYS_STATED["async-grpo"],
    *VLLM_SETTINGS,
    *TRAINED,
    "steps_per_generation",
    "generation_batch_size",
    "packing",
    "mask_truncated_completions",
)
"""Settings taken from the script even at their default: it trains with them all the same."""


def read_script(flags: Flags, hardware: Hardware) -> ParsedScript:
    """Inspect the script of `--script`, as it is on the hardware."""
    if flags.framework != "trl":
        raise BadInput(
            "--script is for scripts that build a trainer of TRL's, and not for"
            f" {flags.framework}.",
            way_out="For any other program: --framework command -- COMMAND.",
        )
    for name in SCRIPT_FLAGS:
        if getattr(flags, name) is not None:
            raise BadInput(
                f"--{name} and --script can't both define what is trained.",
                way_out=f"Leave --{name} out.",
            )
    python = environment.interpreter(flags.python)
    method = None if flags.method == Flags().method else flags.method
    script = look_at(
        flags.script,
        flags.arguments,
        python=python,
        hardware=hardware,
        rewards=flags.rewards,
        method=method,
    )
    inner, look = frameworks.trainer(flags.framework, script.look.method), script.look
    return ParsedScript(
        flags=flags.replace(
            method=look.method, weights="real" if look.model.given else flags.weights
        ),
        config=_config(script, inner),
        script=script,
        trainer=script_trainer(inner, script),
        model=_model(look),
    )


def _config(script: UserScript, trainer: Trainer) -> UserConfig:
    """Return the script's settings as a configuration: plain values, and the rest."""
    look, known = script.look, trainer.fields()
    stated = {
        name: value for name in HELD if name in known and (value := look.raw.get(name)) is not None
    }
    given = {name: value for name, value in {**stated, **look.settings}.items() if name in known}
    plain = {
        name: value
        for name, value in given.items()
        if _is_plain(value) and not name.startswith(SIDE_EFFECTS)
    }
    rest = {name: value for name, value in given.items() if name not in plain}
    # ModelConfig settings of the script; TRL loads named models in float32.
    model, adapter = look.model, look.adapter
    settings: dict[str, KnobValue] = {
        **plain,
        "dtype": model.dtype or "float32",
        "use_peft": adapter is not None,
    }
    if model.attn_implementation:
        settings["attn_implementation"] = model.attn_implementation
    if model.load_in_4bit or model.load_in_8bit:
        settings |= {"load_in_4bit": model.load_in_4bit, "load_in_8bit": model.load_in_8bit}
    settings |= {name: value for name, value in (adapter or {}).items() if _is_plain(value)}
    if (
        look.method in PROMPTED
    ):  # the longest prompt of the script's data: TRL has no limit of its own
        settings["max_prompt_length"] = (
            max(look.prompts.values()) if look.prompts else DEFAULT_PROMPT_LENGTH
        )
    return UserConfig(
        path=Path(script.path), settings=settings, rest=rest, notes=tuple(_notes(script))
    )


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _model(look: ScriptInspection) -> Model:
    """Look up the model by name; a model built by the script has its own shape."""
    model = look.model
    if not model.given:
        return model_lookup.find_model(str(model.name))
    try:
        found = model_lookup.find_model(model.name) if model.name else None
    except BadInput:
        found = None
    name = model.name or "a model of its own"
    return Model(
        name=name,
        config=model.config or {},
        folder=found.folder if found else None,
        origin="made by the script",
    )


def _notes(script: UserScript) -> list[str]:
    look = script.look
    notes = [
        (
            f"{script.path} builds {look.trainer} at {look.trainer_place}; up to there it runs"
            " unchanged, once per load"
        )
    ]
    if look.callbacks:
        notes.append(
            f"left out of probes, because they may write or stop it: {', '.join(look.callbacks)}"
        )
    if look.ended_by is not None:
        notes.append(
            f"it uses trainer.{look.ended_by} before it trains: what it does from there on is not"
            " measured"
        )
    if script.rewards == "skip" and look.rewards:
        names = ", ".join(look.rewards)
        notes.append(
            f"rewards are not called (--rewards skip): {names}; neither their time nor their memory"
            " is measured"
        )
    if look.prompts is None and look.method in PROMPTED:
        why = f" ({look.prompts_why})" if look.prompts_why else ""
        notes.append(
            f"its prompt lengths could not be determined{why}: {DEFAULT_PROMPT_LENGTH} is assumed;"
            " see --max-prompt-length"
        )
    if "rollout_func" in look.special:
        notes.append(
            "its rollout_func decides how long completions get: the certificate contains their"
            " lengths"
        )
    return notes
