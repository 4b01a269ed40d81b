"""Launch script of --from-command -> UserFile: its one training command is the baseline.

The script is read as bash expands it, and not run. Files that the command names (TRL's YAML,
prime-rl's TOML) are read with it; words of the command override them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from autotune import frameworks
from autotune.core.errors import BadInput
from autotune.core.job import Tuning
from autotune.core.shell_script import UNKNOWN, commands_of
from autotune.core.space import KnobValue, setting_text
from autotune.core.units import counted
from autotune.core.user_script import LaunchScript, StatedSetting
from autotune.core.yaml_document import Document, KeyPath, read_document
from autotune.frameworks.base import Field, Trainer, plain_default
from autotune.frameworks.configuration_files import why_unread
from autotune.frameworks.copied_defaults import (
    CopiedDefault,
    copied_defaults,
    copied_file,
    named_file,
)
from autotune.frameworks.launch_arguments import is_known, stated_value
from autotune.frameworks.launch_commands import find_launch
from autotune.frameworks.launch_kinds import LaunchKind, kind_of
from autotune.frameworks.trl.former_keys import former_keys
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.user_config import UserConfig, split_document
from autotune.frameworks.unset_variables import (
    lacks_value,
    variables,
    ways_to_give,
    without_value,
)
from autotune.request.origins import Origin, Source
from autotune.request.sources.config_file import origins_of
from autotune.request.sources.launched_program import launch_text
from autotune.request.values import FileChoice, UserFile

LAUNCHER_ONLY = frozenset(
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
"""Options of launchers before TRL's script, without an effect on the training."""


OF_SCHEDULER = frozenset(
    {
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "rdzv_conf",
        "role",
    }
)
"""Options of accelerate that a scheduler gives: where only a run knows them, --gpus decides."""


BOOLEANS = {"1": True, "0": False, "t": True, "f": False, "T": True, "F": False}
"""Words for true and false that transformers' argument parser takes, besides YAML's."""


OTHER_MODEL = re.compile(r"(?:^|[._])model(?:[._](?:name_or_)?path|_name)$")
"""Settings that name a model, as `verifier.model.path`: of those that are not read, none counts."""


def read_launch_script(
    choice: FileChoice, stated_by_flags: frozenset[str] = frozenset()
) -> UserFile:
    """Read the script and its one training command.

    `stated_by_flags`: settings under autotune's or the framework's names, whose values in the
    script are not needed.
    """
    text = launch_text(choice)
    commands = commands_of(text, choice.arguments, os.environ)
    launch = find_launch(choice.path, text, commands)
    kind = kind_of(launch.framework)
    trainer = frameworks.trainer(launch.framework, launch.method)
    launch = trainer.in_own_terms(launch)
    if kind.config_files is not None:
        launch = replace(launch, in_copy=copied_file(launch, kind.config_files) is not None)
    stated_by_flags |= {
        trainer.canonical[name] for name in stated_by_flags if name in trainer.canonical
    }
    if launch.framework == "trl":
        fields = trainer.fields()
        config, origins = _trl_config(launch, fields, stated_by_flags)
    else:
        config, origins = _framework_config(launch, kind, trainer, stated_by_flags)
    tuning = None
    if launch.framework != "trl":
        tuning = _tuning(launch, kind)
    return UserFile(
        framework=launch.framework,
        method=launch.method,
        model=config.model or _model(launch, kind),
        why_no_model=_why_no_model(launch, kind),
        model_hints=_model_hints(launch),
        tuning=tuning,
        config=config,
        origins=origins,
        launch=launch,
        unread=stated_by_flags & launch.stated.keys() - config.settings.keys(),
        script_gpus=trainer.script_gpus(launch),
        trainer=trainer,
    )


def _model(launch: LaunchScript, kind: LaunchKind) -> str | None:
    stated = launch.stated.get(kind.model)
    if stated is None or not is_known(stated):
        return None
    return stated.text or None


def _why_no_model(launch: LaunchScript, kind: LaunchKind) -> str:
    """Return why the script names no model that exists, if its variables may be the reason."""
    stated = launch.stated.get(kind.model)
    if stated is None or not stated.unset:
        return ""
    return f"{launch.path}, line {stated.line}: {kind.model} needs {variables(stated)}, not set."


NAME_OF_RUN = re.compile(
    r"(?:^|[._])(?:experiment_name|exp_name|run_name|wandb_name|project_name|output_dir"
    r"|default_local_dir|ckpt_path|save_path|hub_model_id)$"
)
"""Settings whose text often says which model is trained."""


def _model_hints(launch: LaunchScript) -> dict[str, str]:
    """Return the texts of a launch that may say its model: names of the run, then its own name."""
    hints: dict[str, str] = {}
    for name, stated in launch.stated.items():
        if NAME_OF_RUN.search(name) and stated.text:
            hints[f"{name} (line {stated.line})"] = stated.text.replace(UNKNOWN, "-")
    hints["the script's name"] = Path(launch.path).stem
    return hints


def _origin(launch: LaunchScript, stated: StatedSetting) -> Origin:
    return Origin(
        source=Source.FILE,
        place=launch.path,
        line=stated.line,
    )


# Frameworks with settings on their command line, or in TOML files.


def _framework_config(
    launch: LaunchScript,
    kind: LaunchKind,
    trainer: Trainer,
    stated_by_flags: frozenset[str],
) -> tuple[UserConfig, dict[str, Origin]]:
    """Return the settings that the framework's table has; the others stay in the script."""
    fields = _known_fields(kind, trainer)
    _refuse_unread_files(launch, kind, fields)
    split = _split(launch, kind, trainer, fields, stated_by_flags)
    if split.outputs:
        names = " ".join(f"--hold {name}=VALUE" for name in split.outputs)
        raise BadInput(
            f"{launch.path}: {'; '.join(split.outputs.values())}.",
            way_out=f"Write its value, or give it: {names}.",
        )
    copied = _copied(launch, kind, fields, stated_by_flags)
    former = _former_defaults(launch, kind, stated_by_flags)
    config = UserConfig(
        path=Path(launch.path),
        settings={**former, **{name: copied[name].value for name in copied}, **split.settings},
        rest={},
        notes=tuple(_notes(launch, split, trainer)),
        assumed=(
            *_assumed(launch, split, trainer, stated_by_flags),
            *_about_copy(launch, kind, trainer, copied),
            *(
                f"{name}={setting_text(former[name])}, as in releases with these names"
                for name in former
            ),
        ),
    )
    origins = {name: _origin(launch, launch.stated[name]) for name in split.settings}
    for name in former:
        origins[name] = Origin(
            source=Source.FILE,
            place=launch.path,
            line=launch.line,
        )
    for name, default in copied.items():
        place = os.path.relpath(default.file)
        origins[name] = Origin(
            source=Source.FILE,
            place=place,
            line=default.line,
        )
    return config, origins


def _former_defaults(
    launch: LaunchScript,
    kind: LaunchKind,
    stated_by_flags: frozenset[str],
) -> dict[str, KnobValue]:
    """Return the defaults of an earlier release, if the launch has its names."""
    if not launch.is_former:
        return {}
    defaults: dict[str, KnobValue] = {}
    for name, value in kind.former_defaults.items():
        if name not in launch.stated and name not in stated_by_flags:
            defaults[name] = value
    return defaults


def _copied(
    launch: LaunchScript,
    kind: LaunchKind,
    fields: Mapping[str, Field],
    stated_by_flags: frozenset[str],
) -> dict[str, CopiedDefault]:
    """Return what the configuration files of a copy state, and neither command nor flags do."""
    if kind.config_files is None:
        return {}
    unread = {*stated_by_flags, *kind.follows_hardware, kind.model, kind.adapter}
    copied = copied_defaults(launch, kind.config_files, fields, kind.former)
    defaults = {}
    for name, default in copied.items():
        if name not in unread and not name.startswith(kind.kept):
            defaults[name] = default
    return defaults


def _about_copy(
    launch: LaunchScript,
    kind: LaunchKind,
    trainer: Trainer,
    copied: Mapping[str, CopiedDefault],
) -> Iterator[str]:
    """Yield the copy's defaults that decide memory, and a configuration file that is not here."""
    by_file: dict[Path, list[str]] = {}
    for name, default in copied.items():
        if name in trainer.decides_memory:
            by_file.setdefault(default.file, []).append(f"{name}={setting_text(default.value)}")
    for file, settings in by_file.items():
        yield (
            f"{os.path.relpath(file)} is the configuration of this copy of {launch.framework}:"
            f" {', '.join(settings)}"
        )
    config_name = launch.config_name
    if config_name is None or kind.config_files is None:
        return
    if config_name.name.removesuffix(".yaml") + ".yaml" in kind.config_files.names:
        return
    if named_file(launch, config_name, kind.config_files) is None:
        yield (
            f"no setting of {config_name.name} (--config-name, line {config_name.line}), whose file"
            " is not here: give them with --set NAME=VALUE, or run where it is"
        )


def _known_fields(kind: LaunchKind, trainer: Trainer) -> Mapping[str, Field]:
    """Return the framework's fields, and settings for which only earlier releases had flags."""
    fields = dict(trainer.fields())
    for name in trainer.canonical:
        if name not in fields and name in kind.former.values():
            fields[name] = Field(kinds=("int",), default=None)
    return fields


def _refuse_unread_files(
    launch: LaunchScript,
    kind: LaunchKind,
    fields: Mapping[str, Field],
) -> None:
    if kind.files is None:
        return
    for name, stated in launch.stated.items():
        reason = why_unread(kind.files, name, stated.text, fields)
        if reason is not None:
            raise BadInput(
                f"{launch.path}, line {stated.line}: {reason}.",
                way_out="Leave it out, or use --framework command.",
            )


@dataclass
class _StatedSplit:
    """Settings of a command by what becomes of them."""

    settings: dict[str, KnobValue] = field(default_factory=dict)  # held
    # Names that stay in the script, not considered
    left_in_script: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # names that are not known for the release
    lacking: list[str] = field(default_factory=list)  # names without a value: by default
    # Name -> why its value is only known by a run of the script
    outputs: dict[str, str] = field(default_factory=dict)


def _split(
    launch: LaunchScript,
    kind: LaunchKind,
    trainer: Trainer,
    fields: Mapping[str, Field],
    stated_by_flags: frozenset[str],
) -> _StatedSplit:
    split = _StatedSplit()
    for name, stated in launch.stated.items():
        if name in kind.follows_hardware or name == kind.model:
            continue
        if name.startswith(kind.kept):
            split.left_in_script.append(name)
        elif name not in fields:
            is_ours = name.startswith(kind.sections)
            is_ours |= trainer.known_names != frozenset() and name not in trainer.known_names
            unread = split.unknown if is_ours else split.left_in_script
            unread.append(name)
        elif name in stated_by_flags and not _is_readable(stated, fields[name]):
            continue
        elif lacks_value(stated, fields[name]):
            if not _has_default(fields[name]):
                raise without_value(launch.path, name, stated)
            split.lacking.append(name)
        elif not is_known(stated) and _has_default(fields[name]) and not _is_number(fields[name]):
            split.lacking.append(name)
        elif not is_known(stated):
            split.outputs[name] = (
                f"line {stated.line}: {name} is the output of a command, which is not run"
            )
        else:
            value = stated_value(stated, fields[name])
            if value is not None or "null" in fields[name].kinds:
                split.settings[name] = value
    return split


def _is_readable(stated: StatedSetting, setting: Field | None) -> bool:
    return is_known(stated) and not lacks_value(stated, setting)


def _is_number(setting: Field) -> bool:
    return not {"int", "float"}.isdisjoint(setting.kinds)


def _has_default(setting: Field) -> bool:
    return setting.default is not None or setting.follows is not None


def _assumed(
    launch: LaunchScript,
    split: _StatedSplit,
    trainer: Trainer,
    stated_by_flags: frozenset[str],
) -> Iterator[str]:
    """Yield what the answer rests on besides the script's own values."""
    yield from launch.assumed
    for name in split.lacking:
        stated = launch.stated[name]
        default = trainer.fields()[name].default
        value = name if default is None else f"{name}={setting_text(default)}"
        if stated.unset:
            reason = f"needs {variables(stated)}, not set. Give it: {ways_to_give(name, stated)}"
        else:
            reason = f"has the output of a command, which is not run. Give it: --set {name}=VALUE"
        yield f"{value} (the default of {launch.framework}): line {stated.line} {reason}"
    fields = trainer.fields()
    for name, default in trainer.assumed_defaults.items():
        if name in fields and name not in split.settings and name not in stated_by_flags:
            yield (
                f"{name}={setting_text(plain_default(fields[name]))} where {launch.framework} takes"
                f" {default}: --set {name}=VALUE gives it"
            )
    for name in (*split.unknown, *split.left_in_script):
        stated = launch.stated[name]
        if OTHER_MODEL.search(name) and stated.text not in (None, "", "null", "None"):
            yield f"no memory of the model of {name} (line {stated.line})"
    if split.unknown:
        places = [f"{name} (line {launch.stated[name].line})" for name in split.unknown]
        yield (
            f"no effect on memory of settings that are not known for {launch.framework}"
            f" {trainer.release}: {', '.join(places)}"
        )


def _notes(
    launch: LaunchScript,
    split: _StatedSplit,
    trainer: Trainer,
) -> Iterator[str]:
    yield (
        f"read from {launch.path}, line {launch.line}: {counted(len(split.settings), 'setting')}"
        f" of {launch.framework} {launch.method}"
    )
    if launch.former:
        releases = ", ".join(trainer.requires.values())
        yield (
            f"flags of an earlier {launch.framework} are read as those of {releases}, which is"
            " modelled"
        )
    if split.left_in_script:
        yield f"kept in the script, but not considered: {', '.join(split.left_in_script)}"


def _tuning(launch: LaunchScript, kind: LaunchKind) -> Tuning:
    """Return the tuning that the command names, else the one that its adapter's rank means."""
    if kind.tuner is None:
        rank = launch.stated.get(kind.adapter or "")
        return "full" if rank is None or rank.text in (None, "0") else "lora"
    tuner = launch.stated.get(kind.tuner)
    if tuner is not None and tuner.text == "full":
        return "full"
    bits = launch.stated.get("quant_bits")
    return "qlora" if bits is not None and bits.text == "4" else "lora"


# TRL, with a YAML file below its command line.


def _trl_config(
    launch: LaunchScript,
    fields: Mapping[str, Field],
    stated_by_flags: frozenset[str],
) -> tuple[UserConfig, dict[str, Origin]]:
    """Return the settings of the YAML file behind `--config`, overridden by the command line."""
    content: dict[str, object] = {}
    places: dict[KeyPath, tuple[int, int]] = {}
    repeated: tuple[str, ...] = ()
    path = Path(launch.path)

    # 1. The file.
    config_file = launch.stated.get("config")
    if config_file is not None and config_file.text:
        path = _beside(launch, config_file.text)
        document = read_document(path, last_counts=True)
        repeated = document.repeated
        content.update((str(name), value) for name, value in document.content.items())
        places.update(document.places)

    # 2. The command line.
    for name, stated in launch.stated.items():
        if name == "config" or (name in LAUNCHER_ONLY and name not in fields):
            continue
        present_name = former_keys().present_name(name, fields)
        if name in OF_SCHEDULER and not _is_readable(stated, None):
            continue
        is_stated_by_flag = {name, present_name} & stated_by_flags
        if is_stated_by_flag and not _is_readable(stated, fields.get(present_name)):
            continue
        if lacks_value(stated, fields.get(present_name)):
            raise without_value(launch.path, name, stated)
        if is_known(stated):
            content[name] = _trl_value(stated, fields.get(name))
            places[(name,)] = (stated.line, 1)
        elif not name.startswith(SIDE_EFFECTS):
            raise BadInput(
                f"{launch.path}, line {stated.line}: {name} is the output of a command, which is"
                " not run.",
                way_out=f"Write its value, or give it with --hold {name}=VALUE.",
            )

    # 3. The launcher's own file, which is relative to the script.
    if "config_file" in content:
        accelerate_file = _beside(launch, str(content.pop("config_file")))
        content["accelerate_config"] = str(accelerate_file.absolute())
        places[("accelerate_config",)] = places.get(("config_file",), (1, 1))

    document = Document(
        path=path,
        content=content,
        places=places,
        repeated=repeated,
    )
    config = split_document(document, launch.method)
    config = replace(config, assumed=(*launch.assumed, *config.assumed))
    origins = origins_of(config, document, launch.method)
    for key, stated in launch.stated.items():
        name = former_keys().present_name(key, fields)
        if name in origins:
            origins[name] = _origin(launch, stated)
    return config, origins


def _trl_value(stated: StatedSetting, setting: Field | None) -> object:
    """Return the value as TRL's parser reads it."""
    if stated.text is None:
        return True
    kinds = () if setting is None else setting.kinds
    if "list" in kinds:
        return [yaml.safe_load(word) for word in stated.text.split()]
    if "bool" in kinds and not {"int", "float"} & {*kinds} and stated.text in BOOLEANS:
        return BOOLEANS[stated.text]
    try:
        value: object = yaml.safe_load(stated.text)
    except yaml.YAMLError:
        return stated.text
    is_number_or_date = not isinstance(value, dict | list | bool | None)
    if is_number_or_date and "str" in kinds and "float" not in kinds:
        return stated.text
    return value


def _beside(launch: LaunchScript, name: str) -> Path:
    """Return the path of a file: in the working folder, else beside the script."""
    path = Path(name).expanduser()
    if path.is_absolute() or path.is_file():
        return path
    beside_script = Path(launch.path).parent / path
    return beside_script if beside_script.is_file() else path
