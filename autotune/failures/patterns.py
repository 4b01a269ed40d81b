"""Tables of this package: YAML files under tables/, decoded and checked on first use.

A pattern in a table is one string or a list of alternatives. Line breaks in it are dropped, alternatives are joined by `|`,
and `${name}` stands for the fragment of that name in fragments.yaml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import TypeVar

import msgspec.yaml

Pattern = str | list[str]  # pattern as a table writes it

Decoded = TypeVar("Decoded")

_REFERENCE = re.compile(r"\$\{(\w+)\}")


class _ArgumentNames(msgspec.Struct, forbid_unknown_fields=True):
    """Names of settings, separated by blanks."""

    training_arguments: str
    lora_config: str
    trainer_configs: dict[str, str]


def read_table(name: str, type_: type[Decoded]) -> Decoded:
    """Return the content of tables/<name>.yaml, checked against the type."""
    content = resources.files(__package__).joinpath("tables", f"{name}.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=type_)


def expand(pattern: Pattern) -> str:
    """Return the regular expression of a table's pattern."""
    return _joined(pattern, _fragments())


@functools.cache
def _fragments() -> Mapping[str, str]:
    expanded = {"of_another_version": _refused_arguments()}
    for name, pattern in read_table("fragments", dict[str, Pattern]).items():
        expanded[name] = _joined(pattern, expanded)  # a fragment may contain earlier ones
    return expanded


def _joined(pattern: Pattern, fragments: Mapping[str, str]) -> str:
    alternatives = [pattern] if isinstance(pattern, str) else pattern
    return "|".join(_REFERENCE.sub(lambda found: fragments[found[1]], one.replace("\n", "")) for one in alternatives)


def _refused_arguments() -> str:
    """Return the pattern of Python's refusal of an argument that another version of the same class has."""
    names = read_table("argument_names", _ArgumentNames)
    classes = {
        **{owner: f"{own} {names.training_arguments}" for owner, own in names.trainer_configs.items()},
        "(?:Seq2Seq)?TrainingArguments": names.training_arguments,
        "LoraConfig": names.lora_config,
    }
    refusals = [
        rf"\b{owner}\.__init__\(\) got an unexpected keyword argument '(?-i:{'|'.join(map(re.escape, arguments.split()))})'"
        for owner, arguments in classes.items()
    ]
    sampling = r"'(?:guided_decoding|structured_outputs|best_of|use_beam_search)'"
    return "|".join([*refusals, rf"\A(?:[\w.]+\.)?TypeError: Unexpected keyword argument {sampling}"])
