"""Conditions and texts of stated rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autotune.core.space import KnobValue
from autotune.frameworks.framework_facts import StatedRule, texts_that_apply
from tests.frameworks.stand_ins import names_in

VALUES: dict[str, KnobValue] = {"batch.rows": 6, "gpus": 4, "share": 0.5, "packs": True, "head": None, "kind": "gae", "empty": ""}


@pytest.mark.parametrize(
    ("name", "condition", "holds"),
    [
        ("batch.rows", 6, True),
        ("batch.rows", "< 6", False),
        ("batch.rows", "<= 6", True),
        ("batch.rows", "> gpus", True),
        ("batch.rows", ">= 7", False),
        ("batch.rows", "!= gpus", True),
        ("batch.rows", "not divisible by gpus", True),
        ("batch.rows", "not divisible by 3", False),
        ("gpus", "not dividing batch.rows", True),
        ("gpus", "not dividing 8", False),
        ("head", "not dividing 8", True),  # no GPU divides nothing
        ("batch.rows", "not divisible by head", True),
        ("share", "< 1", True),
        ("packs", True, True),
        ("packs", [False, None], False),
        ("head", [False, None], True),
        ("head", "given", False),
        ("empty", "given", False),
        ("kind", "given", True),
        ("kind", "gae", True),
        ("kind", "!= gae", False),
        ("kind", "!= group_norm", True),
        ("absent", "< 1", True),
    ],
)
def test_a_condition(name: str, condition: Any, holds: bool) -> None:
    rule = msgspec.convert({"text": "it applies", "when": {name: condition}}, StatedRule)
    assert list(texts_that_apply([rule], "grpo", VALUES.get)) == (["it applies"] if holds else [])


def test_every_condition_must_hold_and_the_method_too() -> None:
    both = StatedRule("both", {"gpus": 4, "packs": True})
    one = StatedRule("one", {"gpus": 4, "packs": False})
    ppo = StatedRule("ppo", methods=("ppo",))
    assert list(texts_that_apply([both, one, ppo], "grpo", VALUES.get)) == ["both"]
    assert list(texts_that_apply([both, one, ppo], "ppo", VALUES.get)) == ["both", "ppo"]


def test_a_text_has_values_as_a_command_line_writes_them() -> None:
    rule = StatedRule("{batch.rows=} rows on {gpus} GPUs, {packs=}")
    assert list(texts_that_apply([rule], "grpo", VALUES.get)) == ["batch.rows=6 rows on 4 GPUs, packs=true"]


def test_a_misspelt_key_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="whn"):
        msgspec.convert({"text": "", "whn": {}}, StatedRule)


def test_names_are_those_of_conditions_operands_and_text() -> None:
    rule = StatedRule("{a.b=} of {c}", {"d": "< e.f", "g": "not dividing gpus", "h": "> 1", "i": True})
    assert names_in(rule) == {"a.b", "c", "d", "e.f", "g", "gpus", "h", "i"}
