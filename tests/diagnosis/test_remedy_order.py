"""Order of remedies whose effects are predicted: as `predict` would rank these changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.diagnosis.diagnosis import Advice
from autotune.diagnosis.remedies import ranked


def advice(name: str, effect: Mapping[str, Any] | None = None) -> Advice:
    return Advice(change={name: "smaller"}, why="it needs less", predicted=effect)


def effect(fits: bool | None, speed_ratio: float | None, *, learning: bool = False) -> Any:
    return {"fits": fits, "speed_ratio": speed_ratio, "changes_what_is_learned": learning}


def test_neutral_changes_that_fit_come_first_by_speed() -> None:
    remedies = [
        advice("not predicted"),
        advice("length", effect(True, None, learning=True)),
        advice("offload", effect(True, 0.4)),
        advice("too little", effect(False, 1.0)),
        advice("may do", effect(None, 1.0)),
        advice("batch", effect(True, 0.98)),
    ]
    names = [name for remedy in ranked(remedies) for name in remedy.change]
    assert names == ["batch", "offload", "length", "not predicted", "too little", "may do"]


def test_speeds_that_print_alike_keep_the_order_of_the_table() -> None:
    remedies = [advice("first", effect(True, 0.981)), advice("second", effect(True, 0.984))]
    assert ranked(remedies) == remedies
