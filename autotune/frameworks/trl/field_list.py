"""Keys of TRL's configuration files over the supported TRL releases, and the defaults of the
installed one.

`make field-lists` writes `fields_<method>.json` with `.ci/list_trl_fields.py`; a test compares them
with the installed TRL. Defaults differ between releases: the installed source is parsed, not
imported. A default that is no literal, and a release without the class, leave the listed default of
the newest release.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from autotune.core.space import KnobValue, is_plain
from autotune.frameworks.base import Field, Settings
from autotune.machine import environment


class _FieldList(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    fields: dict[str, Field]
    accelerate: frozenset[str]


@cache
def _field_list(method: str) -> _FieldList:
    file = Path(__file__).with_name(f"fields_{method}.json")
    return msgspec.json.decode(file.read_bytes(), type=_FieldList)


def fields(method: str = "grpo") -> Mapping[str, Field]:
    """Return every configuration key that TRL accepts for this method."""
    return _field_list(method).fields


@cache
def accelerate_options() -> frozenset[str]:
    """Return the keys that TRL passes to `accelerate launch`."""
    return _field_list("grpo").accelerate | {"accelerate_config"}


@cache
def default(name: str, method: str = "grpo") -> KnobValue:
    """Return TRL's listed default of a setting."""
    value = fields(method)[name].default
    assert is_plain(value)
    return value


def value_of(settings: Settings, name: str) -> object:
    """Return the setting, else TRL's default."""
    return settings[name] if name in settings else fields()[name].default


def number_of(settings: Settings, name: str) -> int:
    """Return the setting or TRL's default as a whole number; 0 if it is none."""
    value = value_of(settings, name)
    return value if isinstance(value, int) else 0


def is_on(settings: Settings, name: str) -> bool:
    return bool(value_of(settings, name))


# Defaults of the installed TRL.

_COMMON_CLASSES: Mapping[str, tuple[str, ...]] = {
    "trainer/base_config.py": ("_BaseConfig", "BaseConfig"),
    "trainer/model_config.py": ("ModelConfig",),
}
"""File in the package -> its classes with defaults for every method."""

_METHOD_CLASSES: Mapping[str, str] = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "reward": "RewardConfig",
}
"""Method -> class in `trainer/<method>_config.py`. Experimental methods have listed defaults."""


@cache
def installed_defaults(python: Path, method: str) -> Mapping[str, KnobValue]:
    """Return plain defaults of the configuration and model settings."""
    defaults: dict[str, KnobValue] = {}
    for name, field in fields(method).items():
        if field.owner in ("config", "model") and is_plain(field.default):
            defaults[name] = field.default
    folder = environment.package_folder(python, "trl")
    if folder is None:
        return defaults
    classes_by_file = dict(_COMMON_CLASSES)
    if method in _METHOD_CLASSES:
        classes_by_file[f"trainer/{method}_config.py"] = (_METHOD_CLASSES[method],)
    for file, classes in classes_by_file.items():
        for name, value in _defaults_in(folder / file, classes):
            if name in defaults:
                defaults[name] = value
    return defaults


def _defaults_in(path: Path, classes: tuple[str, ...]) -> Iterator[tuple[str, KnobValue]]:
    """Yield the literal defaults of the classes' fields."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    value = _default_of(value)
                    if isinstance(value, ast.Constant) and is_plain(value.value):
                        yield name, value.value


def _default_of(value: ast.expr) -> ast.expr:
    """Return the `default` of a call like `field(default=3)`; any other expression as it is."""
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg == "default":
                return keyword.value
    return value
