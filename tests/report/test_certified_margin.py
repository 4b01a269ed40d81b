"""Headroom, varied lengths and steadiness in the phrases of the certificate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.headroom import default_headroom
from autotune.core.units import GIB, MIB
from autotune.report.certificate import certificate_lines, certificate_row, items_of
from tests.report.test_certificate import CASE, WHOLE, proof

JOB = replace(CASE.job, memory_limit_bytes=10 * GIB, headroom=default_headroom(10 * GIB))


@pytest.mark.parametrize(
    ("lowest_gib", "phrases"),
    [(None, "at least 205 MiB, 2% of the limit"), (8, "at least 1 GiB, the spread of its own")],
)
def test_the_headroom_is_named_beside_what_is_left(lowest_gib: int | None, phrases: str) -> None:
    lowest_bytes = None if lowest_gib is None else lowest_gib * GIB
    trial = proof(
        WHOLE,
        peak_bytes=9 * GIB,
        lowest_peak_bytes=lowest_bytes,
    )
    assert phrases in certificate_lines(JOB, trial)[0]
    row = certificate_row(JOB, trial)
    assert row is not None
    assert row["headroom_bytes"] == (GIB if lowest_gib else round(0.02 * 10 * GIB))


def test_without_a_headroom_none_is_named() -> None:
    assert "had to be" not in certificate_lines(CASE.job, proof(WHOLE))[0]


@pytest.mark.parametrize(("count", "state"), [(None, None), (4, "done"), (0, "not done")])
def test_varied_lengths_are_an_item_where_they_are_part_of_the_probe(
    count: int | None, state: str | None
) -> None:
    items = items_of(JOB, proof(replace(WHOLE, varied_generations=count)))
    states = {item["name"]: item["state"] for item in items}
    assert states.get("varied lengths") == state


@pytest.mark.parametrize(
    ("timing", "phrases"),
    [
        ({"left_out_cycles": 1, "steady": True}, ["Steady after 1 further warm-up cycle"]),
        ({"left_out_cycles": 4, "steady": False}, ["Not steady", "4 further warm-up cycles"]),
        ({"rank_skew": {"rollout": 1.0, "forward": 0.2}}, ["apart in rollout: 10%"]),
        ({}, []),
    ],
)
def test_what_was_left_out_of_the_timing_is_said(
    timing: dict[str, Any], phrases: list[str]
) -> None:
    trial = proof(WHOLE, peak_bytes=800 * MIB)
    worst = trial.measurement.worst
    assert worst is not None
    timed = replace(
        worst,
        cycle_seconds=(5.0, 5.0),
        cycle_loss_tokens=(80, 80),
        **timing,
    )
    trial = replace(trial, measurement=replace(trial.measurement, worst=timed))
    text = "\n".join(certificate_lines(JOB, trial))
    for part in phrases or [""]:
        assert part in text
    if not phrases:
        assert "teady" not in text and "apart" not in text
