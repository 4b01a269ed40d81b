"""Keys of TRL's YAML: which are known, and their values in the types of the settings."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Mapping

import msgspec

from autotune.core.errors import UnknownName
from autotune.core.yaml_document import Document
from autotune.frameworks.base import Field
from autotune.frameworks.trl.author_keys import is_usual_switch
from autotune.frameworks.trl.config_launch_files import error_at
from autotune.frameworks.trl.field_list import accelerate_options
from autotune.frameworks.trl.field_list import fields as trl_fields
from autotune.frameworks.trl.requests import SIDE_EFFECTS
from autotune.frameworks.trl.settings import OWN_SETTINGS
from autotune.frameworks.trl.user_launch_files import shared_rows

UNTOUCHED = frozenset({"env", "datasets"})
"""Blocks that are passed to TRL unchecked."""

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


def is_known_key(name: str, accepted: Mapping[str, Field]) -> bool:
    """Return True for keys of TRL, of autotune and of `accelerate launch`."""
    if name in accepted or name in UNTOUCHED or name in ENFORCED or name in OWN_SETTINGS:
        return True
    if name.startswith("parallelism_config"):
        return True
    return _is_of_launcher(name)


def _is_of_launcher(name: str) -> bool:
    return name.replace("-", "_") in accelerate_options() and name not in trl_fields()


def refuse_misread(
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
    is_longer = any(
        name.endswith(f"_{key}") or name.startswith(f"{key}_") or name == f"{key}s"
        for key in choices
    )
    is_known = is_longer or is_usual_switch(name)
    if not is_known and difflib.get_close_matches(name, choices, n=1, cutoff=LIKELY):
        raise error_at(document, name, UnknownName("key", name, choices))
    if isinstance(value, Mapping) and not DECISIVE.isdisjoint(value):
        hidden = sorted(DECISIVE.intersection(value))[0]
        raise document.error(
            (name,),
            f"{hidden} is inside {name}, where TRL does not read it.",
            way_out=own_script_instead(document),
        )


def own_script_instead(document: Document) -> str:
    return f"Give the script that reads this file: --script train.py -- --config {document.path}"


def checked_value(
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
        raise error_at(document, key, UnknownName(name, checked, field.choices))
    return checked
