"""tyro for a script on a machine that lacks it: a dataclass or a function gets its defaults and the
options of the command line.

    script_args = tyro.cli(ScriptArguments)   # --training-args.per-device-train-batch-size 4
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from . import absent_fire
from .absent_fire import parsed_options
from .missing_arguments import MODEL_ARGUMENTS

_NO = "no_"  # begin of an option that is false


def cli(
    target: Any,
    *_: Any,
    args: Sequence[str] | None = None,
    default: Any = None,
    **__: Any,
) -> Any:
    """Return the dataclass's object, or what the function returns."""
    argv = sys.argv[1:] if args is None else args
    stated = parsed_options(argv)[1]
    options: dict[str, Any] = {}
    for name, value in stated.items():
        *path, last = name.split(".")
        is_negated = value is True and last.startswith(_NO)
        last = last.removeprefix(_NO) if is_negated else last
        options[".".join([*path, last])] = False if is_negated else value
    return _completed(target, default, options)


def _completed(
    target: Any,
    default: Any,
    options: Mapping[str, Any],
) -> Any:
    values: dict[str, Any] = {}
    missing: list[str] = []
    for name, start in _defaults_of(target, default).items():
        value = options.get(name, start)
        below = _below(name, options)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            _assign(value, below)
        if value is inspect.Parameter.empty and name in MODEL_ARGUMENTS:
            value = absent_fire.model[0]
        if value is inspect.Parameter.empty:
            missing.append(f"--{name.replace('_', '-')}")
        else:
            values[name] = value
    if missing:
        print(f"the following arguments are required: {', '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)
    return target(**values)


def _defaults_of(target: Any, default: Any) -> dict[str, Any]:
    """Return the arguments of a dataclass or a function with their defaults."""
    defaults: dict[str, Any] = {}
    if not dataclasses.is_dataclass(target):
        for name, parameter in inspect.signature(target).parameters.items():
            defaults[name] = parameter.default
        return defaults
    for field in dataclasses.fields(target):
        if not field.init:
            continue
        if default is not None:
            defaults[field.name] = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            defaults[field.name] = _completed(field.type, None, {})
        else:
            defaults[field.name] = inspect.Parameter.empty
    return defaults


def _below(
    name: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the options of a part: `optimizer.lr` of `optimizer` is `lr`."""
    prefix = f"{name}."
    below = {}
    for option, value in options.items():
        if option.startswith(prefix):
            below[option.removeprefix(prefix)] = value
    return below


def _assign(
    part: Any,
    options: Mapping[str, Any],
) -> None:
    """Give a part that is built already the values of its options."""
    for name, value in options.items():
        owner = part
        *path, last = name.split(".")
        for step in path:
            owner = getattr(owner, step)
        setattr(owner, last, value)


def fill(module: types.ModuleType) -> None:
    """Give a placeholder the one function that scripts use."""
    if module.__name__ == "tyro":
        vars(module)["cli"] = cli
