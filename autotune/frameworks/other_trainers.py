"""Programs that train and that no table of a framework reads: a refusal names them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import msgspec

from autotune.core.yaml_document import packaged_table


class OtherTrainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Words that start a program: a row of `other_trainers.yaml`."""

    name: str
    commands: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    with_options: tuple[str, ...] = ()
    """Options of which a file of a common name needs one; none: it needs none."""


@cache
def _table() -> tuple[OtherTrainer, ...]:
    return packaged_table("autotune.frameworks", "other_trainers.yaml", tuple[OtherTrainer, ...])


def other_trainer_in(texts: Sequence[str]) -> str:
    """Return the name of the program that a command starts; empty: it is none of these."""
    pairs: set[str] = set()
    for first, second in itertools.pairwise(texts):
        pairs.add(f"{_last_part(first)} {second}")
    options = set(" ".join(texts).replace("=", " ").split())
    for row in _table():
        if not pairs.isdisjoint(row.commands):
            return row.name
        has_options = not row.with_options or not options.isdisjoint(row.with_options)
        if has_options and _starts_one_of(texts, row.modules):
            return row.name
    return ""


def _starts_one_of(texts: Sequence[str], modules: Sequence[str]) -> bool:
    for module in modules:
        for text in texts:
            if text == module or text.endswith(f"/{module}"):
                return True
    return False


def _last_part(text: str) -> str:
    return text.rpartition("/")[2]
