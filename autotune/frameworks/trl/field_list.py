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

from autotune.core.space import KnobValue
from autotune.frameworks.base import Field
from autotune.machine import environment


class _FieldList(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    fields: dict[str, Field]
    accelerate: frozenset[str]


@cache
def _field_list(method: str) -> _FieldList:
    return msgspec.json.decode(
        Path(__file__).with_name(f"fields_{method}.json").read_bytes(), type=_FieldList
    )


def fields(method: str = "grpo") -> Mapping[str, Field]:
    """Return every configuration key that TRL accepts for this method."""
    return _field_list(method).fields


@cache
def accelerate_options() -> frozenset[str]:
    """Return the keys that TRL passes to `accelerate launch`."""
    return _field_list("grpo").accelerate | {"accelerate_config"}


def listed_versions() -> tuple[str, ...]:
    return _field_list("grpo").versions


_CLASSES: Mapping[str, tuple[str, tuple[str]]] = {
    method: (f"trainer/{method}_config.py", (f"{method.upper()}Config",))
    for method in ("grpo", "rloo", "sft", "dpo", "kto")
} | {"reward": ("trainer/reward_config.py", ("RewardConfig",))}
"""Method -> file in the package, class. The experimental methods have their listed defaults."""

_COMMON = (
    ("trainer/base_config.py", ("_BaseConfig", "BaseConfig")),
    ("trainer/model_config.py", ("ModelConfig",)),
)


@cache
def installed_defaults(python: Path, method: str) -> Mapping[str, KnobValue]:
    """Return plain defaults of the configuration and model settings."""
    listed = {
        name: field.default
        for name, field in fields(method).items()
        if field.owner in ("config", "model")
        and (field.default is None or isinstance(field.default, bool | int | float | str))
    }
    folder = environment.package_folder(python, "trl")
    if folder is None:
        return listed
    found: dict[str, KnobValue] = {}
    for file, classes in (*_COMMON, *([_CLASSES[method]] if method in _CLASSES else [])):
        found |= dict(_defaults_in(folder / file, classes))
    return {**listed, **{name: value for name, value in found.items() if name in listed}}


def _defaults_in(path: Path, classes: tuple[str, ...]) -> Iterator[tuple[str, KnobValue]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        for line in node.body:
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and line.value is not None
            ):
                value = line.value
                if isinstance(value, ast.Call):
                    value = next(
                        (word.value for word in value.keywords if word.arg == "default"), value
                    )
                if isinstance(value, ast.Constant) and (
                    value.value is None or isinstance(value.value, bool | int | float | str)
                ):
                    yield line.target.id, value.value
