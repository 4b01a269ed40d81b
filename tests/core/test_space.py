"""The arithmetic of knobs and spaces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.errors import BadInput, UnknownName
from autotune.core.space import Knob, SearchSpace


def knob(name: str, choices: list[object], **facts: object) -> Knob:
    return Knob(
        **{"name": name, "choices": tuple(choices), "effect": "neutral", "says": name, **facts}
    )  # type: ignore[arg-type]


def space(*knobs: Knob) -> SearchSpace:
    return SearchSpace(
        name="s",
        about="",
        method="grpo",
        framework="trl",
        knobs=knobs,
        objective="preference",
    )


ENGINE = space(
    knob("engine", [False, True]),
    knob("share", [0.2, 0.3], when={"engine": (True,)}),
    knob("batch", [1, 2, 4]),
)


def test_assignments_leave_out_knobs_that_do_not_apply() -> None:
    assignments = list(ENGINE.assignments())
    assert len(assignments) == 3 + 2 * 3
    assert all(("share" in assignment) == assignment["engine"] for assignment in assignments)


@given(
    st.lists(
        st.lists(
            st.integers(0, 5),
            min_size=1,
            max_size=3,
            unique=True,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_assignment_comes_once(choices: list[list[int]]) -> None:
    assignments = [
        tuple(assignment.items())
        for assignment in space(
            *(knob(f"k{n}", list(values)) for n, values in enumerate(choices))
        ).assignments()
    ]
    expected = 1
    for values in choices:
        expected *= len(values)
    assert len(assignments) == len(set(assignments)) == expected


def test_other_choices_hold_or_widen_a_knob() -> None:
    narrowed = ENGINE.with_choices({"engine": [True], "share": [0.4]})
    assert [dict(assignment) for assignment in narrowed.assignments()] == [
        {"engine": True, "share": 0.4, "batch": batch} for batch in (1, 2, 4)
    ]
    assert ENGINE["engine"].choices == (False, True), "the space itself must not change"


def test_choices_for_an_unknown_knob_name_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Unknown knob 'bach'.*'batch'"):
        ENGINE.with_choices({"bach": [1]})
    with pytest.raises(BadInput, match="'batch' was left without a value"):
        ENGINE.with_choices({"batch": []})


@pytest.mark.parametrize(
    ("settings", "effect"),
    [
        ({}, "neutral"),
        ({"loss": "dapo", "entropy": 0.0}, "neutral"),
        ({"loss": "bnpo"}, "learning"),
        ({"entropy": 0.1}, "learning"),
        ({"entropy": 0}, "neutral"),
    ],
)
def test_a_neutral_knob_can_learn_under_some_settings(
    settings: dict[str, object], effect: str
) -> None:
    batch = knob(
        "batch", [1, 2], learning_when={"loss": ("bnpo",)}, learning_unless={"entropy": (0.0,)}
    )
    assert batch.effect_under(settings) == effect
    assert (batch in space(batch).learning_knobs(settings)) == (effect == "learning")


def test_a_learning_knob_always_learns() -> None:
    assert knob("g", [1], effect="learning").effect_under({}) == "learning"
