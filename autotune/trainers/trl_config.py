"""Reads the user's own TRL YAML: checked key by key, its parts told apart, nothing lost."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autotune.candidate import KnobValue
from autotune.document import Document, read_document
from autotune.errors import UnknownName
from autotune.trainers.trl_fields import Field, accelerate_options, fields
from autotune.trainers.trl_settings import OWN_SETTINGS
from autotune.trainers.trl_topology import DEEPSPEED, FSDP

UNTOUCHED = frozenset({"env", "datasets"})
"""Blocks that TRL reads in its own way; they are carried as they are."""

READY_MADE: Mapping[str, str] = {"single_gpu": "none", "multi_gpu": "ddp", **{name: name for name in (*DEEPSPEED, *FSDP)}}
"""TRL's ready-made accelerate configurations, and what they are in `sharding`."""

REPLACED = frozenset(
    {"accelerate_config", "config_file", "num_processes", "num_machines", "machine_rank", "multi_gpu", "mixed_precision"}
)
"""Launch options that the written accelerate.yaml decides."""

_OWN_WAY = {
    "max_prompt_length": "Give autotune --max-prompt-length: it filters the dataset, and the written YAML points to the result.",
    "sharding": "Say `accelerate_config: zero3` in the file, or give autotune --hold sharding=zero3.",
}
ELSEWHERE = "Give it to autotune instead: --hold {name}=VALUE."
"""What to type instead of our own settings in TRL's file."""

_TYPES: dict[str, object] = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict, "null": None}


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """A `trl grpo --config` file, by what its parts are for."""

    path: Path
    settings: Mapping[str, KnobValue]
    """GRPOConfig's and ModelConfig's plain values: what `Workload.held` takes."""

    rest: Mapping[str, object]
    """Everything else, untouched: script arguments, datasets, env, lists, launch options. What `Workload.user_settings` takes."""

    @property
    def model(self) -> str | None:
        return self._text("model_name_or_path")

    @property
    def dataset(self) -> str | None:
        return self._text("dataset_name")

    @property
    def launch(self) -> Mapping[str, object]:
        """The part of `rest` that goes to `accelerate launch`."""
        return {name: value for name, value in self.rest.items() if is_launch_option(name)}

    def _text(self, name: str) -> str | None:
        value = self.rest.get(name)
        return value if isinstance(value, str) else None


def is_launch_option(name: str) -> bool:
    return name not in fields() and name.replace("-", "_") in accelerate_options() and name not in UNTOUCHED


def read_user_config(path: Path, method: str = "grpo") -> UserConfig:
    """The user's file for this method, or BadInput that names the line, the key and the nearest ones that exist."""
    document = read_document(path)
    settings: dict[str, KnobValue] = {}
    rest: dict[str, object] = {}
    for name, value in document.content.items():
        checked = _checked(document, str(name), value, fields(method))
        plain = checked is None or isinstance(checked, bool | int | float | str)
        if plain and _is_setting(str(name), fields(method)):
            settings[str(name)] = checked  # type: ignore[assignment]
        else:
            rest[str(name)] = checked
    sharding = READY_MADE.get(str(rest.get("accelerate_config")), "none")
    if sharding not in ("none", "ddp"):
        settings["sharding"] = sharding
    return UserConfig(path=path, settings=settings, rest=rest)


def _is_setting(name: str, fields: Mapping[str, Field]) -> bool:
    known = fields.get(name)
    return known is not None and known.owner in ("config", "model") and name != "model_name_or_path"


def _checked(document: Document, name: str, value: object, fields: Mapping[str, Field]) -> object:
    if name in fields and name not in UNTOUCHED:
        return _converted(document, name, value, fields[name])
    if name in OWN_SETTINGS:
        raise document.error(
            (name,),
            f"TRL has no {name}.",
            way_out=_OWN_WAY.get(name, ELSEWHERE.format(name=name)),
        )
    if name not in UNTOUCHED and not is_launch_option(name):
        unknown = UnknownName("key", name, [*fields, *accelerate_options(), *UNTOUCHED])
        raise document.error((name,), unknown.what, way_out=unknown.way_out)
    if name == "accelerate_config" and value not in READY_MADE:
        raise document.error(
            (name,),
            f"accelerate_config {value!r} is none of TRL's ready-made ones, which are the ones that can be measured.",
            way_out=f"Use one of {', '.join(sorted(READY_MADE))}, or leave it out.",
        )
    return value


def _converted(document: Document, name: str, value: object, field: Field) -> object:
    """The value in the field's own type: YAML reads `1e-6` as text, and TRL makes it a number."""
    if "other" in field.kinds:
        return value
    types = [_TYPES[kind] for kind in field.kinds]
    numeric = not {"str", "list", "dict"} & set(field.kinds)
    try:
        # Text is turned into a number only where no text is meant.
        checked = msgspec.convert(value, functools.reduce(operator.or_, types), strict=not (numeric and isinstance(value, str)))
    except msgspec.ValidationError as error:
        takes = " or ".join(kind for kind in field.kinds)
        raise document.error((name,), f"{name} takes {takes}, and is {value!r}.", way_out="Correct the value.") from error
    if field.choices and isinstance(checked, str) and checked not in field.choices:
        unknown = UnknownName(f"{name}", checked, field.choices)
        raise document.error((name,), unknown.what, way_out=unknown.way_out)
    return checked
