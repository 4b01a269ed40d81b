"""Shorter probes on simulated machines, whose figures follow from the lengths."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from search_lengths import WAYS, Way, search
from search_machines import Simulated
from search_setups import Setup, setup


@pytest.fixture(name="case", scope="module")
def small_case() -> Setup:
    return setup("qwen2.5-0.5b-full-4090")


def test_half_the_lengths_and_rollouts_are_a_quarter_of_the_tokens(case: Setup) -> None:
    machine = case.machine(0)
    assert isinstance(machine, Simulated)
    compared = 0
    for candidate in case.posed.candidates:
        if candidate.settings["gradient_accumulation_steps"] % 2 == 0:
            tokens = machine.truth(candidate).tokens
            short = machine.shortened(0.5)
            assert short.truth(candidate).tokens == pytest.approx(tokens / 4)
            compared += 1
    assert compared > 10


def test_shorter_rows_need_less_memory(case: Setup) -> None:
    machine = case.machine(0)
    assert isinstance(machine, Simulated)
    for candidate in case.posed.candidates[:20]:
        short = machine.shortened(0.5).peak_bytes(candidate)
        assert short <= machine.peak_bytes(candidate)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_without_time_there_is_no_answer_and_with_much_there_is(case: Setup, way: Way) -> None:
    none = search(case, 0, way, minutes=0)
    assert none.probes == 0
    assert none.share == 0
    enough = search(case, 0, way, minutes=600)
    assert enough.probes > 10
    assert 0.8 < enough.share <= 1
