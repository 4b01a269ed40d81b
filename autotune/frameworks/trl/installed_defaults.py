"""Defaults of the installed TRL release, read from its source: they differ between releases.

The source is parsed, not imported. A default that is no literal, and a release without the class,
leave the listed default of the newest release.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from autotune.core.space import KnobValue
from autotune.frameworks.trl.field_list import fields
from autotune.machine import environment

_CLASSES: Mapping[str, tuple[str, tuple[str]]] = {
    method: (f"trainer/{method}_config.py", (f"{method.upper()}Config",)) for method in ("grpo", "rloo", "sft", "dpo", "kto")
} | {"reward": ("trainer/reward_config.py", ("RewardConfig",))}
"""Method -> file in the package, class. The experimental methods have their listed defaults."""

_COMMON = (("trainer/base_config.py", ("_BaseConfig", "BaseConfig")), ("trainer/model_config.py", ("ModelConfig",)))


@cache
def installed_defaults(python: Path, method: str) -> Mapping[str, KnobValue]:
    """Return plain defaults of the configuration and model settings."""
    listed = {
        name: field.default
        for name, field in fields(method).items()
        if field.owner in ("config", "model") and (field.default is None or isinstance(field.default, bool | int | float | str))
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
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                value = line.value
                if isinstance(value, ast.Call):
                    value = next((word.value for word in value.keywords if word.arg == "default"), value)
                if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool | int | float | str)):
                    yield line.target.id, value.value
