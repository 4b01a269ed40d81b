"""User's own TRL YAML: every key is checked and assigned to its consumer.

A key that TRL lacks belongs to a dataclass of the author's script: it is kept and listed. One that
is nearly a key of TRL is refused as a typing error.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from autotune.core.errors import BadInput, UnknownName
from autotune.core.space import KnobValue
from autotune.core.yaml_document import Document, read_document
from autotune.frameworks.base import Field
from autotune.frameworks.trl.field_list import accelerate_options, is_plain
from autotune.frameworks.trl.field_list import fields as trl_fields
from autotune.frameworks.trl.former_keys import former_keys
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.settings import DEEPSPEED, FSDP_VERSIONS, OWN_SETTINGS
from autotune.frameworks.trl.user_launch_files import (
    LaunchFile,
    read_accelerate,
    read_deepspeed,
    read_fsdp,
    shared_rows,
)

UNTOUCHED = frozenset({"env", "datasets"})
"""Blocks that are passed to TRL unchecked."""

READY_MADE: Mapping[str, str] = {
    "single_gpu": "none",
    "multi_gpu": "ddp",
    **{name: name for name in (*DEEPSPEED, *FSDP_VERSIONS)},
}
"""Accelerate configurations of TRL -> value of `sharding`."""

LAUNCH_FILES = ("accelerate_config", "config_file", "deepspeed", "fsdp", "fsdp_config")
"""Settings that name a launch configuration, or hold one."""

REPLACED = frozenset(
    {*LAUNCH_FILES, "num_processes", "num_machines", "machine_rank", "multi_gpu", "mixed_precision"}
)
"""Launch options that the written accelerate.yaml determines."""

TRAINED = (
    "dtype",
    "num_generations",
    "max_completion_length",
    "max_length",
    "max_new_tokens",
    "beta",
    "loss_type",
    "num_iterations",
)
"""Settings that decide what is learned, besides the learning knobs of a space."""

METHODS_OF_FILES = ("grpo", "sft", "dpo", "reward", "kto", "rloo")
"""Methods with a command of TRL, the usual ones first."""

LIKELY = 0.87
"""Least similarity of a typing error to the key that was meant: a missing ending counts as well."""

DECISIVE = frozenset(
    {
        *TRAINED,
        "model_name_or_path",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "learning_rate",
        "lora_r",
        "use_vllm",
    }
)
"""Settings that may not be overlooked inside a block that TRL does not read."""

ENFORCED = frozenset({"max_prompt_length"})
"""Settings of TRL before 1.0 that autotune enforces itself."""

_FIXES = {
    "max_prompt_length": "Write a whole number: longer prompts are filtered from the dataset.",
    "sharding": "Write `accelerate_config: zero3` in the file, or use --hold sharding=zero3.",
}
"""Fix for autotune's own settings in TRL's file."""

_TYPES: dict[str, object] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "null": None,
}


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """File of `trl grpo --config`, split by consumer."""

    path: Path
    # Plain values of GRPOConfig and ModelConfig, for `Workload.held_values`
    settings: Mapping[str, KnobValue]
    notes: tuple[str, ...] = ()  # former keys, and what became of them
    assumed: tuple[str, ...] = ()  # what stands in for values that the file does not give
    # Keys of DeepSpeed and FSDP, replaced by the written accelerate.yaml
    moved: Mapping[str, object] = field(default_factory=dict)
    processes: int | None = None  # ranks of the user's accelerate file
    rest: Mapping[str, object]
    """Other keys, unchanged: script arguments, datasets, env, lists, launch options. For
    `Workload.user_settings`.
    """

    @property
    def model(self) -> str | None:
        """Return TRL's setting, else the one of the author's own dataclass."""
        for name in ("model_name_or_path", *former_keys().model_names):
            if self._text(name):
                return self._text(name)
        return None

    @property
    def dataset(self) -> str | None:
        return self._text("dataset_name")

    def _text(self, name: str) -> str | None:
        value = self.rest.get(name)
        return value if isinstance(value, str) else None


def read_user_config(path: Path, method: str = "grpo") -> UserConfig:
    """Read the user's file. Raises BadInput with the line, the key and the nearest existing keys
    of everything that is wrong.
    """
    return split_document(read_document(path), method)


def split_document(document: Document, method: str = "grpo") -> UserConfig:
    """Check each key of a file and assign it to its consumer."""
    _refuse_launch_configuration(document)
    _refuse_other_program(document)
    split = _SplitKeys(document, method)
    errors: list[BadInput] = []
    for key, value in document.content.items():
        try:
            split.add(key, value)
        except BadInput as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if not errors:
        split.refuse_foreign_file()
    else:
        listed = "\n".join(f"  {error.what} {error.way_out}" for error in errors)
        raise BadInput(
            f"{document.path}: {len(errors)} settings are wrong.\n{listed}\n",
            way_out="Correct each of them.",
        )
    return split.config()


def _refuse_launch_configuration(document: Document) -> None:
    """Refuse a file of DeepSpeed or accelerate in place of TRL's."""
    for key, library, setting in (
        ("zero_optimization", "DeepSpeed", "deepspeed"),
        ("distributed_type", "accelerate", "accelerate_config"),
    ):
        if key in document.content:
            raise document.error(
                (key,),
                f"a configuration of {library}, which says how the training is launched.",
                way_out=(
                    f"Name it in TRL's file: `{setting}: {document.path.name}`. Or hold its"
                    " sharding: --hold sharding=zero3."
                ),
            )


def _refuse_other_program(document: Document) -> None:
    """Refuse a file of a program whose settings have other names and defaults."""
    for key, program in former_keys().foreign.items():
        if key in document.content:
            raise document.error(
                (key,),
                f"{key} is a setting of {program}, and not of TRL.",
                way_out="Give the training with flags (--model, --tuning, --set), or TRL's file.",
            )


class _SplitKeys:
    """Keys of a file, assigned one after the other."""

    def __init__(self, document: Document, method: str) -> None:
        self._document = document
        self._method = method
        self._accepted = trl_fields(method)
        self._settings: dict[str, KnobValue] = {}
        self._rest: dict[str, object] = {}
        self._moved: dict[str, object] = {}
        self._processes: int | None = None
        self._launch_notes: list[str] = []
        self._renamed: list[str] = []
        self._left_out: dict[str, list[str]] = {}  # reason -> keys
        self._of_author: list[str] = []

    def add(self, key: object, stated: object) -> None:
        """Assign one key. Raises BadInput if it is wrong."""
        # 1. Present name and value.
        former = former_keys()
        name = former.present_name(str(key), self._accepted)
        value = former.present_value(name, stated)
        if name not in self._accepted and name in former.left_out:
            self._left_out.setdefault(former.left_out[name], []).append(name)
            return
        if value != stated:
            self._renamed.append(f"{key}={stated} as {name}={value}")
        elif name != key:
            self._renamed.append(f"{key} as {name}")
        other_value = self._document.content.get(name, value)
        if name != key and other_value == value and name in self._document.content:
            return  # the present name says the same
        if name != key and other_value != value:
            raise self._document.error(
                (str(key),), f"{key} and {name} are the same setting.", way_out=f"Keep {name}."
            )
        # 2. Configurations of the launch.
        is_ready_made = isinstance(value, str) and value in READY_MADE
        if name in LAUNCH_FILES and value is not None and not is_ready_made:
            self._add_launch_file(name, value)
            return
        # 3. Keys of the author's own script.
        if not _is_known(name, self._accepted):
            _refuse_misread(self._document, name, value, self._accepted)
            self._of_author.append(name)
            self._rest[name] = value
            return
        # 4. Settings, and everything else.
        checked = _checked(self._document, str(key), name, value, self._accepted)
        if self._is_tunable(name) and is_plain(checked):
            self._settings[name] = checked
        else:
            self._rest[name] = checked

    def refuse_foreign_file(self) -> None:
        """Refuse a file none of whose keys is TRL's, and one of another method."""
        if not self._of_author:
            return
        place = (self._of_author[0],)
        listed = ", ".join(self._of_author[:4])
        if len(self._of_author) == len(self._document.content):
            raise self._document.error(
                place,
                f"none of its keys is TRL's ({listed}).",
                way_out=_own_script(self._document),
            )
        for method in METHODS_OF_FILES:
            fields_of_method = trl_fields(method)
            if all(name in fields_of_method for name in self._document.content):
                raise self._document.error(
                    place,
                    f"{listed}: settings of {method}, and not of {self._method}.",
                    way_out=f"Add --method {method}.",
                )

    def _add_launch_file(self, name: str, value: object) -> None:
        launch = _launch_file(self._document, name, value)
        _refuse_conflicts(self._document, name, launch.fixed, self._accepted)
        self._settings |= launch.settings
        self._launch_notes += launch.notes
        self._processes = launch.processes or self._processes
        consumer = self._rest if name in ("accelerate_config", "config_file") else self._moved
        consumer[name] = value

    def _is_tunable(self, name: str) -> bool:
        """Return True for settings of the trainer's configuration and of the model."""
        if name in ENFORCED:
            return True
        if name not in self._accepted or name == "model_name_or_path":
            return False
        return self._accepted[name].owner in ("config", "model")

    def _assumed(self) -> Iterator[str]:
        """Yield what TRL reads otherwise than the author's own script may do."""
        rank = self._settings.get("lora_r")
        if self._of_author and rank is not None and "use_peft" not in self._settings:
            yield (
                f"full fine-tuning: lora_r={rank} is stated without use_peft, which TRL needs for"
                " an adapter; --tuning lora trains one"
            )

    def config(self) -> UserConfig:
        """Return the file, split by consumer."""
        notes = list(self._launch_notes)
        if self._renamed:
            notes.append(f"read under present names: {', '.join(self._renamed)}")
        if self._of_author:
            listed = ", ".join(self._of_author)
            notes.insert(0, f"not read, because TRL has no such setting: {listed}")
        for reason, names in self._left_out.items():
            notes.append(f"left out of the written file: {', '.join(names)} ({reason})")
        settings = dict(self._settings)
        sharding = READY_MADE.get(str(self._rest.get("accelerate_config")), "none")
        if sharding not in ("none", "ddp"):
            settings["sharding"] = sharding
        return UserConfig(
            path=self._document.path,
            settings=settings,
            rest=self._rest,
            moved=self._moved,
            notes=tuple(notes),
            assumed=(*self._document.repeated, *self._assumed()),
            processes=self._processes,
        )


# 1. Configurations of the launch.


def _launch_file(
    document: Document,
    name: str,
    value: object,
) -> LaunchFile:
    """Read the file or mapping behind a setting of the launch; errors name its place."""
    try:
        return _read_launch_file(document, name, value)
    except BadInput as error:
        raise _error_at(document, name, error) from error


def _read_launch_file(
    document: Document,
    name: str,
    value: object,
) -> LaunchFile:
    if name == "fsdp_config":
        return LaunchFile(settings={})  # read with `fsdp`
    if name == "fsdp":
        options = document.content.get("fsdp_config")
        if not isinstance(options, Mapping):
            options = {}
        return read_fsdp(str(value), options)
    if isinstance(value, Mapping):
        return read_deepspeed(value)
    path = Path(str(value)).expanduser()
    if not path.is_absolute() and not path.is_file():
        path = document.path.parent / path
    if not path.is_file():
        choices = "a file"
        if name == "accelerate_config":
            choices = " or ".join(sorted(READY_MADE))
        raise BadInput(f"{name} {value!r}: no such file.", way_out=f"Give a path, or {choices}.")
    if name == "deepspeed":
        return read_deepspeed(path)
    return read_accelerate(path)


def _refuse_conflicts(
    document: Document,
    name: str,
    fixed: Mapping[str, object],
    accepted: Mapping[str, Field],
) -> None:
    """Refuse a DeepSpeed configuration that differs from the trainer's settings, as transformers
    does.
    """
    for setting, value in fixed.items():
        stated = document.content.get(setting, accepted[setting].default)
        if comparable(stated) != comparable(value):
            raise document.error(
                (name,),
                f"DeepSpeed's configuration has {value} for {setting}, which is {stated}:"
                " transformers refuses to train.",
                way_out='Write "auto" in the DeepSpeed configuration.',
            )


def comparable(value: object) -> object:
    """Return a value in the form in which equal settings are equal: YAML reads `1e-6` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value)


def _error_at(
    document: Document,
    key: str,
    error: BadInput,
) -> BadInput:
    """Return the error with the place of the key."""
    return document.error((key,), error.what, way_out=error.way_out)


# 2. Settings.


def _is_known(name: str, accepted: Mapping[str, Field]) -> bool:
    """Return True for keys of TRL, of autotune and of `accelerate launch`."""
    if name in accepted or name in UNTOUCHED or name in ENFORCED or name in OWN_SETTINGS:
        return True
    if name.startswith("parallelism_config"):
        return True
    return _is_of_launcher(name)


def _is_of_launcher(name: str) -> bool:
    return name.replace("-", "_") in accelerate_options() and name not in trl_fields()


def _refuse_misread(
    document: Document,
    name: str,
    value: object,
    accepted: Mapping[str, Field],
) -> None:
    """Refuse an unknown key that is probably a typing error of a setting that a training depends
    on, and a block with such settings in it.
    """
    choices = []
    for key, setting in accepted.items():
        if setting.owner in ("config", "model") and not key.startswith(SIDE_EFFECTS):
            choices.append(key)
    is_longer = any(name.endswith(f"_{key}") or name == f"{key}s" for key in choices)
    if not is_longer and difflib.get_close_matches(name, choices, n=1, cutoff=LIKELY):
        raise _error_at(document, name, UnknownName("key", name, choices))
    if isinstance(value, Mapping) and not DECISIVE.isdisjoint(value):
        hidden = sorted(DECISIVE.intersection(value))[0]
        raise document.error(
            (name,),
            f"{hidden} is inside {name}, where TRL does not read it.",
            way_out=_own_script(document),
        )


def _own_script(document: Document) -> str:
    return f"Give the script that reads this file: --script train.py -- --config {document.path}"


def _checked(
    document: Document,
    key: str,
    name: str,
    value: object,
    accepted: Mapping[str, Field],
) -> object:
    """Return the checked value; `key` is the name in the file, for the place of an error."""
    if name.startswith("parallelism_config"):
        options = value if isinstance(value, Mapping) else {name: value}
        shared = shared_rows(options)
        if shared is not None:
            problem, way_out = shared
            raise document.error((name,), problem, way_out=way_out)
    if name in UNTOUCHED:
        return value
    # 1. Keys of TRL.
    if name in accepted:
        kinds = accepted[name].kinds
        if name == "loss_type" and "str" not in kinds and isinstance(value, str):
            value = [value]  # a single loss, before TRL 0.20
        if name == "lora_target_modules" and isinstance(value, str):
            return value  # PEFT's pattern or `all-linear`, which TRL's parser passes on as it is
        return _converted(document, key, name, value, accepted[name])
    # 2. Keys of autotune.
    if name in ENFORCED and isinstance(value, int | None) and not isinstance(value, bool):
        return value
    if name in OWN_SETTINGS:
        way_out = _FIXES.get(name, f"Use a flag instead: --hold {name}=VALUE.")
        raise document.error((name,), f"{name}: not a setting of TRL.", way_out=way_out)
    return value  # an option of `accelerate launch`


def _converted(
    document: Document,
    key: str,
    name: str,
    value: object,
    field: Field,
) -> object:
    """Convert a value to the field's type. YAML reads `1e-6` as text, which becomes a number."""
    if "other" in field.kinds or value is None:
        return value
    types = [_TYPES[kind] for kind in field.kinds]
    accepted_type = functools.reduce(operator.or_, types)
    takes_text = not {"str", "list", "dict"}.isdisjoint(field.kinds)
    strict = takes_text or not isinstance(value, str)
    try:
        checked = msgspec.convert(value, accepted_type, strict=strict)
    except msgspec.ValidationError as error:
        if name.startswith(SIDE_EFFECTS):  # without an effect on a step: TRL's parser decides
            return value
        expected = " or ".join(field.kinds)
        raise document.error(
            (key,), f"{name} takes {expected}, and is {value!r}.", way_out="Correct the value."
        ) from error
    if field.choices and isinstance(checked, str) and checked not in field.choices:
        raise _error_at(document, key, UnknownName(name, checked, field.choices))
    return checked
