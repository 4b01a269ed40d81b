from __future__ import annotations

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.errors import BadInput, UnknownName
from autotune.core.space import KnobValue
from autotune.request.assignments import (
    check_names,
    check_values,
    parse_holds,
    parse_searches,
    parse_value,
)

SPACE = load_space("grpo")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.3", 0.3),
        ("true", True),
        ("false", False),
        ("null", None),
        ("1e-6", 1e-6),
        ("dapo", "dapo"),
        (" sdpa ", "sdpa"),
        ("[1", "[1"),
    ],
)
def test_values_read_as_in_yaml(text: str, value: KnobValue) -> None:
    read = parse_value(text)
    assert read == value and type(read) is type(value)


def test_holds_and_searches() -> None:
    assert parse_holds(["beta=0.04", "use_vllm=false"]) == {"beta": 0.04, "use_vllm": False}
    assert parse_searches(["num_generations=4,8,8"]) == {"num_generations": (4, 8)}


@pytest.mark.parametrize("text", ["beta", "=3", "beta=", "", "beta = "])
def test_invalid_assignments(text: str) -> None:
    with pytest.raises(BadInput, match="form K=V"):
        parse_holds([text])


def test_twice_is_once_too_often() -> None:
    with pytest.raises(BadInput, match="twice"):
        parse_holds(["beta=0", "beta=1"])
    with pytest.raises(BadInput, match="twice"):
        parse_searches(["beta=0", "beta=1"])


def test_a_search_without_values() -> None:
    with pytest.raises(BadInput, match="no value"):
        parse_searches(["beta=,"])


def test_an_unknown_knob_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'num_generations'"):
        check_names(["num_generation"], SPACE)
    check_names(["learning_rate"], SPACE, settings=["learning_rate"])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_generations", "many", "a whole number, like 16, 8 or 4"),
        ("num_generations", 2.5, "a whole number"),
        ("num_generations", True, "a whole number"),
        ("use_vllm", "maybe", "true or false"),
        ("use_vllm", 1, "true or false"),
        ("vllm_gpu_memory_utilization", "half", "a number, like 0.3"),
        ("loss_type", 3, "a name, like dapo"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    name: str,
    value: KnobValue,
    says: str,
) -> None:
    with pytest.raises(BadInput, match=says):
        check_values(SPACE, {name: (value,)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_generations", 6),
        ("vllm_gpu_memory_utilization", 1),
        ("dtype", "bfloat16"),
        ("use_peft", True),
    ],
)
def test_a_value_outside_the_choices_is_welcome(name: str, value: KnobValue) -> None:
    check_values(SPACE, {name: (value,)})
