"""Each file of measurements is judged by what it says it measured, not by a count of its own."""

from __future__ import annotations

from typing import Any

from tests.gpu.committed import complaints

START = {"kind": "start", "basis": "measured", "machine": {"date": "2026-11-26"}}


def point(outcome: str = "ok", basis: str = "measured") -> dict[str, Any]:
    return {"kind": "point", "key": "k1", "basis": basis, "outcome": outcome}


def step(name: str) -> dict[str, Any]:
    return {"kind": "step", "name": name, "basis": "measured", "outcome": "ok"}


def test_a_small_file_is_good() -> None:
    assert complaints([START, point(), step("sft")]) == []


def test_a_file_without_points_is_good_if_no_step_had_any() -> None:
    assert complaints([START, step("identity")]) == []


def test_a_step_that_ended_well_has_points() -> None:
    assert len(complaints([START, step("sft")])) == 1
    assert len(complaints([START, point("failed to start"), step("sft")])) == 1


def test_a_file_has_a_machine_and_a_date() -> None:
    assert len(complaints([point()])) == 1


def test_emulated_figures_are_not_measured() -> None:
    assert len(complaints([START, point(basis="emulated")])) == 1
