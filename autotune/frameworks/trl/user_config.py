"""User's own TRL YAML: every key is checked and assigned to its consumer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from autotune.core.errors import BadInput, UnknownName
from autotune.core.space import KnobValue
from autotune.core.yaml_document import Document, packaged_table, read_document
from autotune.frameworks.base import Field
from autotune.frameworks.trl.field_list import accelerate_options
from autotune.frameworks.trl.field_list import fields as trl_fields
from autotune.frameworks.trl.launch_files import (
    LaunchFile,
    read_accelerate,
    read_deepspeed,
    read_fsdp,
    shared_rows,
)
from autotune.frameworks.trl.settings import DEEPSPEED, FSDP_VERSIONS, OWN_SETTINGS


class FormerKeys(msgspec.Struct, frozen=True):
    """Table of former keys: `former_keys.yaml`."""

    renamed: dict[str, str]
    values: dict[str, dict[str, str]]
    left_out: dict[str, str]

    def present_name(self, name: str, known: Mapping[str, object]) -> str:
        """Return the present name of a key; the name itself if it is none of the former ones."""
        return name if name in known else self.renamed.get(name, name)

    def present_value(self, name: str, value: object) -> object:
        return self.values.get(name, {}).get(str(value), value)


@cache
def former_keys() -> FormerKeys:
    return packaged_table("autotune.frameworks.trl", "former_keys.yaml", FormerKeys)


UNTOUCHED = frozenset({"env", "datasets"})  # blocks that are passed to TRL unchecked
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

OWN = frozenset({"max_prompt_length"})  # settings of TRL before 1.0 that autotune enforces itself
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
    settings: Mapping[
        str, KnobValue
    ]  # plain values of GRPOConfig and ModelConfig, for `Workload.held`
    notes: tuple[str, ...] = ()  # former keys, and what became of them
    moved: Mapping[str, object] = field(
        default_factory=dict
    )  # of DeepSpeed and FSDP, replaced by the written accelerate.yaml
    processes: int | None = None  # ranks of the user's accelerate file
    rest: Mapping[str, object]
    """Other keys, unchanged: script arguments, datasets, env, lists, launch options. For
    `Workload.user_settings`.
    """

    @property
    def model(self) -> str | None:
        return self._text("model_name_or_path")

    @property
    def dataset(self) -> str | None:
        return self._text("dataset_name")

    def _text(self, name: str) -> str | None:
        value = self.rest.get(name)
        return value if isinstance(value, str) else None


def comparable(value: object) -> object:
    """Return a value in the form in which equal settings are equal: YAML reads `1e-6` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def read_user_config(path: Path, method: str = "grpo") -> UserConfig:
    """Read the user's file. Raises BadInput with the line, the key and the nearest existing keys
    of everything that is wrong.
    """
    return split_document(read_document(path), method)


def split_document(document: Document, method: str = "grpo") -> UserConfig:
    """Check each key of a file and assign it to its consumer."""
    for key, of, setting in (
        ("zero_optimization", "DeepSpeed", "deepspeed"),
        ("distributed_type", "accelerate", "accelerate_config"),
    ):
        if key in document.content:
            fix = (
                f"Name it in TRL's file: `{setting}: {document.path.name}`. Or hold its sharding:"
                " --hold sharding=zero3."
            )
            raise document.error(
                (key,),
                f"a configuration of {of}, which says how the training is launched.",
                way_out=fix,
            )
    path, known, former = document.path, trl_fields(method), former_keys()
    settings: dict[str, KnobValue] = {}
    rest: dict[str, object] = {}
    moved: dict[str, object] = {}
    notes: list[str] = []
    processes: int | None = None
    wrong: list[BadInput] = []
    renamed: list[str] = []
    left_out: dict[str, list[str]] = {}
    for key, given in document.content.items():
        name = former.present_name(str(key), known)
        value = former.present_value(name, given)
        if name not in known and name in former.left_out:
            left_out.setdefault(former.left_out[name], []).append(name)
            continue
        if name != key or value != given:
            renamed.append(
                f"{key} as {name}" if value == given else f"{key}={given} as {name}={value}"
            )
        try:
            if name != key and name in document.content:
                raise document.error(
                    (str(key),), f"{key} and {name} are the same setting.", way_out=f"Keep {name}."
                )
            if name in LAUNCH_FILES and not (
                value is None or (isinstance(value, str) and value in READY_MADE)
            ):
                launch = _launch_file(document, name, value)
                _compare(document, name, launch.fixed, known)
                settings |= launch.settings
                notes += launch.notes
                processes = launch.processes or processes
                (rest if name in ("accelerate_config", "config_file") else moved)[name] = value
                continue
            checked = _checked(document, str(key), name, value, known)
        except BadInput as error:
            wrong.append(error)
            continue
        found = known.get(name)
        tunable = (
            found is not None
            and found.owner in ("config", "model")
            and name != "model_name_or_path"
        ) or name in OWN
        if tunable and (checked is None or isinstance(checked, bool | int | float | str)):
            settings[name] = checked
        else:
            rest[name] = checked
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        listed = "\n".join(f"  {error.what} {error.way_out}" for error in wrong)
        raise BadInput(
            f"{path}: {len(wrong)} settings are wrong.\n{listed}\n", way_out="Correct each of them."
        )
    notes += [f"read under present names: {', '.join(renamed)}"] if renamed else []
    notes += [
        f"left out of the written file: {', '.join(names)} ({why})"
        for why, names in left_out.items()
    ]
    sharding = READY_MADE.get(str(rest.get("accelerate_config")), "none")
    if sharding not in ("none", "ddp"):
        settings["sharding"] = sharding
    return UserConfig(
        path=path,
        settings=settings,
        rest=rest,
        moved=moved,
        notes=tuple(notes),
        processes=processes,
    )


def _launch_file(document: Document, name: str, value: object) -> LaunchFile:
    """Read the file or mapping behind a setting of the launch."""
    try:
        if name == "fsdp_config":
            return LaunchFile(settings={})  # read with `fsdp`
        if name == "fsdp":
            options = document.content.get("fsdp_config")
            return read_fsdp(str(value), options if isinstance(options, Mapping) else {})
        if isinstance(value, Mapping):
            return read_deepspeed(value)
        path = Path(str(value)).expanduser()
        path = path if path.is_absolute() or path.is_file() else document.path.parent / path
        if not path.is_file():
            near = " or ".join(sorted(READY_MADE)) if name == "accelerate_config" else "a file"
            raise BadInput(f"{name} {value!r}: no such file.", way_out=f"Give a path, or {near}.")
        return read_deepspeed(path) if name == "deepspeed" else read_accelerate(path)
    except BadInput as error:
        raise document.error((name,), error.what, way_out=error.way_out) from error


def _compare(
    document: Document, name: str, fixed: Mapping[str, object], known: Mapping[str, Field]
) -> None:
    """Refuse a DeepSpeed configuration that differs from the trainer's settings, as transformers
    does.
    """
    for own, value in fixed.items():
        given = document.content.get(own, known[own].default)
        if comparable(given) != comparable(value):
            problem = (
                f"DeepSpeed's configuration has {value} for {own}, which is {given}: transformers"
                " refuses to train."
            )
            raise document.error(
                (name,), problem, way_out='Write "auto" in the DeepSpeed configuration.'
            )


def _checked(
    document: Document, key: str, name: str, value: object, fields: Mapping[str, Field]
) -> object:
    """Return the checked value; `key` is the name in the file, for the place of an error."""
    if name.startswith("parallelism_config") and (
        shared := shared_rows(value if isinstance(value, Mapping) else {name: value})
    ):
        raise document.error((name,), shared[0], way_out=shared[1])
    if name in fields and name not in UNTOUCHED:
        if name == "loss_type" and "str" not in fields[name].kinds and isinstance(value, str):
            value = [value]  # a single loss, before TRL 0.20
        if name == "lora_target_modules" and isinstance(value, str):
            return value  # PEFT's pattern or `all-linear`, which TRL's parser passes on as it is
        return _converted(document, key, name, value, fields[name])
    if name in OWN and isinstance(value, int | None) and not isinstance(value, bool):
        return value
    if name in OWN_SETTINGS:
        fix = _FIXES.get(name, f"Use a flag instead: --hold {name}=VALUE.")
        raise document.error((name,), f"{name}: not a setting of TRL.", way_out=fix)
    launches = name.replace("-", "_") in accelerate_options() and name not in trl_fields()
    if name not in UNTOUCHED and not launches:
        unknown = UnknownName("key", name, [*fields, *accelerate_options(), *UNTOUCHED])
        raise document.error((name,), unknown.what, way_out=unknown.way_out)
    return value


def _converted(document: Document, key: str, name: str, value: object, field: Field) -> object:
    """Convert a value to the field's type. YAML reads `1e-6` as text, which becomes a number."""
    if "other" in field.kinds:
        return value
    wanted = functools.reduce(operator.or_, (_TYPES[kind] for kind in field.kinds))
    strict = bool({"str", "list", "dict"} & set(field.kinds)) or not isinstance(value, str)
    try:
        checked = msgspec.convert(value, wanted, strict=strict)
    except msgspec.ValidationError as error:
        expected = " or ".join(field.kinds)
        raise document.error(
            (key,), f"{name} takes {expected}, and is {value!r}.", way_out="Correct the value."
        ) from error
    if field.choices and isinstance(checked, str) and checked not in field.choices:
        unknown = UnknownName(name, checked, field.choices)
        raise document.error((key,), unknown.what, way_out=unknown.way_out)
    return checked
