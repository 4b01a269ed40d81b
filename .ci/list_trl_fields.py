"""Lists the fields of `trl grpo --config` as JSON on stdout: owner, types and default of each.

The interpreter with the listed TRL runs it. `autotune/frameworks/trl/fields_grpo.json` is this
output,
merged over the supported releases (python list_trl_fields.py --merge A.json B.json ...); a test
compares it with the installed release. `fields_sft.json` and others are the same for `trl sft` and
so on (--method sft).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import json
import sys
import types
import typing
from pathlib import Path

OWNERS = ("script", "config", "model", "mixture")
# Methods without a command: package, configuration, and the module and class of the arguments of
# their script.
EXPERIMENTAL = {
    "async-grpo": (
        "trl.experimental.async_grpo",
        "AsyncGRPOConfig",
        "trl.scripts.grpo",
        "GRPOScriptArguments",
    ),
    "online-dpo": (
        "trl.experimental.online_dpo",
        "OnlineDPOConfig",
        "trl.scripts.grpo",
        "GRPOScriptArguments",
    ),
}
KINDS = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}


def kinds_of(annotation: object) -> list[str]:
    """Return the types of a field as names: `int | None` is `["int", "null"]`."""
    if annotation is type(None):
        return ["null"]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return sorted({kind for part in typing.get_args(annotation) for kind in kinds_of(part)})
    plain = origin or annotation
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        return ["str"]
    return [KINDS.get(typing.cast(type, plain), "other")]


def choices_of(annotation: object) -> list[str]:
    """Return the values of an enumeration among the field's types; the field accepts no others."""
    parts = [annotation, *typing.get_args(annotation)]
    return [
        member.value
        for part in parts
        if isinstance(part, type) and issubclass(part, enum.Enum)
        for member in part
    ]


def default_of(field: dataclasses.Field[typing.Any]) -> object:
    """Return the default as JSON; None for a default that only the framework can make."""
    if field.default_factory is not dataclasses.MISSING:
        return None
    value = None if field.default is dataclasses.MISSING else field.default
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, bool | int | float | str) else None


def fields_of(owner: type) -> dict[str, dict[str, object]]:
    hints = typing.get_type_hints(owner)
    listing: dict[str, dict[str, object]] = {}
    for field in dataclasses.fields(owner):
        facts: dict[str, object] = {
            "kinds": kinds_of(hints[field.name]),
            "default": default_of(field),
        }
        choices = choices_of(hints[field.name]) or list(field.metadata.get("choices") or [])
        listing[field.name] = {**facts, "choices": choices} if choices else facts
    return listing


def accelerate_options() -> list[str]:
    """Return the long options of `accelerate launch`, to which `trl` passes unknown options."""
    from accelerate.commands.launch import launch_command_parser

    actions = launch_command_parser()._actions
    names = {
        option[2:]
        for action in actions
        for option in action.option_strings
        if option.startswith("--")
    }
    return sorted(name for name in names - {"help"} if "-" not in name)


def listing_of(method: str) -> dict[str, object]:
    import trl
    from trl.scripts.utils import DatasetMixtureConfig

    prefix = method.capitalize() if method == "reward" else method.upper()
    command = ("trl", f"{prefix}Config", f"trl.scripts.{method}", f"{prefix}ScriptArguments")
    package, config, script, name_of_arguments = EXPERIMENTAL.get(method, command)
    # Some methods use the common script arguments.
    arguments = getattr(importlib.import_module(script), name_of_arguments, trl.ScriptArguments)
    fields: dict[str, dict[str, object]] = {}
    classes = (
        arguments,
        getattr(importlib.import_module(package), config),
        trl.ModelConfig,
        DatasetMixtureConfig,
    )
    for owner, described in zip(OWNERS, classes, strict=False):
        for name, facts in fields_of(described).items():
            fields.setdefault(name, {"of": owner, **facts})
    return {"versions": [trl.__version__], "fields": fields, "accelerate": accelerate_options()}


def merge(listings: list[dict[str, typing.Any]]) -> dict[str, object]:
    """Merge listings, oldest release first; types and defaults are those of the newest."""
    fields: dict[str, dict[str, object]] = {}
    for listing in listings:
        for name, facts in listing["fields"].items():
            fields[name] = {
                **facts,
                "in": [
                    *typing.cast(list[str], fields.get(name, {}).get("in", [])),
                    *listing["versions"],
                ],
            }
    versions = [version for listing in listings for version in listing["versions"]]
    for facts in fields.values():
        if facts["in"] == versions:
            del facts["in"]
    options = sorted({name for listing in listings for name in listing["accelerate"]})
    return {"versions": versions, "fields": dict(sorted(fields.items())), "accelerate": options}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--merge", nargs="+", metavar="JSON")
    parser.add_argument("--method", default="grpo")
    parser.add_argument("--methods", nargs="+", help="several, as one object by method")
    options = parser.parse_args()
    if options.merge:
        answer = merge([json.loads(Path(path).read_text()) for path in options.merge])
        # One field per line, for small diffs between releases.
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in answer["fields"].items()
        )  # type: ignore[attr-defined]
        rest = f'"accelerate": {json.dumps(answer["accelerate"])}'
        print(
            f'{{"versions": {json.dumps(answer["versions"])},\n"fields": {{\n{lines}\n}},\n{rest}}}'
        )
    elif options.methods:
        json.dump({method: listing_of(method) for method in options.methods}, sys.stdout)
    else:
        json.dump(listing_of(options.method), sys.stdout)


if __name__ == "__main__":
    main()
