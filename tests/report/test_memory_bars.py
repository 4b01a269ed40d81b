"""Bars of phases and parts: in use, kept in torch's cache, and where the logits are."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from autotune.core.prediction import PhasePrediction, Prediction
from autotune.core.units import GIB
from autotune.report.memory_bars import show_memory
from tests.report.test_forecast import PREDICTION, gib

WEIGHTS = 10 * GIB
BACKWARD = {"weights": WEIGHTS, "activations": 10 * GIB}
FORWARD = {"weights": WEIGHTS, "logits": 5 * GIB, "fragmentation": 5 * GIB}


def drawn(prediction: Prediction) -> list[str]:
    stream = io.StringIO()
    show_memory(
        Console(
            file=stream,
            width=100,
            highlight=False,
        ),
        prediction,
    )
    return stream.getvalue().splitlines()


def with_phases(backward: dict[str, int]) -> Prediction:
    phases = []
    for name, parts in (("forward", FORWARD), ("backward", backward)):
        phase = PhasePrediction(
            name=name,  # type: ignore[arg-type]
            peak_bytes=gib(20),
            seconds=None,
            parts=parts,
        )
        phases.append(phase)
    return replace(
        PREDICTION,
        phases=tuple(phases),
        peak_memory_bytes=gib(20),
        breakdown=dict(backward),
    )


def test_a_phase_has_its_live_memory_and_its_high_water_mark() -> None:
    lines = drawn(with_phases(BACKWARD))
    forward = next(line for line in lines if "forward" in line)
    assert forward.split()[-4:] == ["15", "GiB", "20", "GiB"]
    # A quarter of its memory is kept for later requests.
    assert forward.count("█") == 3 * forward.count("▒") > 0
    backward = next(line for line in lines if line.lstrip().startswith("backward"))
    assert backward.split()[-4:] == ["20", "GiB", "20", "GiB"] and "▒" not in backward


def test_logits_are_a_part_or_are_said_to_be_elsewhere() -> None:
    with_rollout = drawn(with_phases(BACKWARD))
    assert "  logits: none at this peak, 5 GiB at that of forward" in with_rollout
    at_peak = drawn(with_phases({**BACKWARD, "activations": 8 * GIB, "logits": 2 * GIB}))
    logits = [line for line in at_peak if "logits" in line]
    assert len(logits) == 1 and logits[0].endswith(" 2 GiB") and "█" in logits[0]
