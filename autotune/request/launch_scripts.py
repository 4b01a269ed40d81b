"""Launch scripts of `--from-command`: every setting of one becomes the baseline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune import frameworks
from autotune.core.errors import BadInput
from autotune.core.files import read_text
from autotune.core.shell_script import commands_of
from autotune.core.space import KnobValue
from autotune.core.units import MIB
from autotune.core.user_script import LaunchScript, StatedSetting
from autotune.core.yaml_document import Document, KeyPath, read_document
from autotune.frameworks.configuration_files import why_unread
from autotune.frameworks.launch_commands import find_launch, is_known, kind_of, stated_value
from autotune.frameworks.settings_table import Field
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.user_config import UserConfig, split_document
from autotune.request.flags import Flags

MAX_SCRIPT_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class ParsedLaunch:
    """Launch script, and its settings as a configuration."""

    script: LaunchScript
    config: UserConfig
    flags: Flags


def read_launch(flags: Flags) -> ParsedLaunch | None:
    """Read the script of `--from-command`; None without one."""
    if flags.from_command is None:
        return None
    for name in ("config", "script"):
        if getattr(flags, name) is not None:
            raise BadInput(f"--{name} and --from-command can't both define what is trained.", way_out=f"Leave --{name} out.")
    path = str(flags.from_command)
    text = read_text(
        Path(path).expanduser(), largest_bytes=MAX_SCRIPT_BYTES, way_out="Give the shell script that starts the training."
    )
    script = find_launch(path, text, commands_of(text, flags.arguments, os.environ))
    config = _trl_config(script) if script.framework == "trl" else _config(script)
    # The script's framework, method, model and tuning, where they are not given.
    named = script.stated.get(kind_of(script.framework).model)
    model = config.model or (named.text if named is not None and is_known(named) else None)
    changes: dict[str, Any] = {"framework": script.framework, "method": script.method, "arguments": ()}
    if flags.model is None and model:
        changes["model"] = model
    if flags.tuning is None and script.framework != "trl":
        changes["tuning"] = _tuning(script)
    return ParsedLaunch(script=script, config=config, flags=flags.replace(**changes))


def _tuning(script: LaunchScript) -> str:
    kind = kind_of(script.framework)
    if kind.tuner is not None:
        stated = script.stated.get(kind.tuner)
        named = stated.text if stated is not None else "lora"
        quantised = script.stated.get("quant_bits")
        return "full" if named == "full" else "qlora" if quantised is not None and quantised.text == "4" else "lora"
    rank = script.stated.get(kind.adapter or "")
    return "lora" if rank is not None and rank.text not in (None, "0") else "full"


def _config(script: LaunchScript) -> UserConfig:
    """Return the settings that the framework's table has; the others stay in the script."""
    trainer, kind = frameworks.trainer(script.framework, script.method), kind_of(script.framework)
    own = trainer.canonical.keys() & set(kind.former.values()) - trainer.fields().keys()  # earlier releases had flags for them
    known = {**trainer.fields(), **{name: Field(kinds=("int",), default=None) for name in own}}
    settings: dict[str, KnobValue] = {}
    kept: list[str] = []
    wrong: list[str] = []
    for name, stated in script.stated.items():
        if kind.files is not None and (why := why_unread(kind.files, name, stated.text, known)) is not None:
            raise BadInput(f"{script.path}, line {stated.line}: {why}.", way_out="Leave it out, or use --framework command.")
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
        raise BadInput(f"{script.path}: {'; '.join(wrong)}.", way_out="Write its value, or give it with --hold NAME=VALUE.")
    notes = [f"read from {script.path}, line {script.line}: {len(settings)} settings of {script.framework} {script.method}"]
    if script.former:
        today = frameworks.trainer(script.framework, script.method).requires
        notes.append(
            f"flags of an earlier {script.framework} are read as those of {', '.join(today.values())}, which is modelled"
        )
    if kept:
        notes.append(f"kept in the script, and not considered: {', '.join(kept)}")
    return UserConfig(path=Path(script.path), settings=settings, rest={}, notes=tuple(notes))


def _trl_config(script: LaunchScript) -> UserConfig:
    """Return the settings of the YAML file behind `--config`, overridden by the command line."""
    known = frameworks.trainer("trl", script.method).fields()
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
                f"{script.path}, line {stated.line}: {name} is the output of a command, which is not run.",
                way_out=f"Write its value, or give it with --hold {name}=VALUE.",
            )
        content[name] = _trl_value(stated, known.get(name))
        places[(name,)] = (stated.line, 1)
    if "config_file" in content:
        content["accelerate_config"] = str(_beside(script, str(content.pop("config_file"))))
        places[("accelerate_config",)] = places.get(("config_file",), (1, 1))
    return split_document(Document(path=path, content=content, places=places), script.method)


_LAUNCHER_ONLY = frozenset({
    "main_process_port", "main_process_ip", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend",
    "rdzv_endpoint", "rdzv_id", "standalone", "num_cpu_threads_per_process", "include", "num_gpus", "use_deepspeed",
})  # fmt: skip


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
    return stated.text if "str" in kinds and not isinstance(value, dict | list | bool | None) and "float" not in kinds else value


def _beside(script: LaunchScript, name: str) -> Path:
    path = Path(name).expanduser()
    beside = Path(script.path).parent / path
    return beside if not path.is_absolute() and not path.is_file() and beside.is_file() else path
