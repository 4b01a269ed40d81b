"""Counted work of made-up steps with many micro-steps: what is foreseen from short traces, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.measurement import Phase
from autotune.predict.pieces import Pieces
from autotune.predict.pieces.points import Point, rows_of
from autotune.predict.pieces.survey import stretch_of, survey
from autotune.trace import Trace, Work
from tests.predict.test_pieces import step

LAYERS, TILE = 28, 1024
SPACE = [
    Point(micro_batch=batch, prompt=prompt, completion=completion, micro_steps=steps)
    for batch in (1, 2, 4, 16) for prompt in (64, 256, 512) for completion in (64, 256, 1024) for steps in (4, 8, 32)
]  # fmt: skip
FAR = [point for point in SPACE if point.micro_steps in (8, 32)]


def one_pass(phase: Phase, point: Point, layers: int, *, times: float, heavier: float = 1.0) -> Work:
    """Attention and weights inside the layers; outside, logits in tiles: weights once for each of them, one buffer for all."""
    batch, tokens = point.micro_batch, point.micro_batch * point.completion
    length = point.prompt + point.completion
    tiles = math.ceil(tokens / TILE)
    inside = {
        "bfloat16": times * layers * heavier * (7e6 * batch * length + 6e3 * batch * length**2),
        "moved_bytes": times * layers * heavier * (2_500_000 + 120_000 * batch * length + 1_000 * length),
        "kernels": times * layers * 110,
    }
    outside = {
        "bfloat16": times * 5e6 * tokens,
        "moved_bytes": times * (21_000 * batch * length + 43_000 * tokens + 9_900_000 * tiles + 130_000 * min(TILE, tokens)),
        "kernels": times * (90 + 4 * tiles),
    }
    total = {what: inside[what] + outside[what] for what in inside}
    return Work(
        phase=phase,
        flops={"bfloat16": total["bfloat16"]},
        moved_bytes=total["moved_bytes"],
        kernels=round(total["kernels"]),
        in_layers=inside,
    )


def worked(point: Point, layers: int, *, recomputed: bool) -> Trace:
    """A whole batch is scored; of the micro-steps behind it two are counted, whatever their number."""
    work = (
        one_pass("score", point, layers, times=point.micro_steps),
        one_pass("forward", point, layers, times=2),
        one_pass("backward", point, layers, times=4, heavier=1.5 if recomputed else 1.0),
    )
    return replace(step(point, layers), work=work)


def follower(*, recomputed: bool) -> Callable[[Point, int | None], Trace]:
    return lambda point, layers: worked(point, layers or LAYERS, recomputed=recomputed)


def largest_error(pieces: Pieces, *, recomputed: bool) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for point, foreseen in zip(FAR, pieces.works.at(rows_of(FAR)), strict=True):
        for seen, true in zip(foreseen, worked(point, LAYERS, recomputed=recomputed).work, strict=True):
            assert seen.phase == true.phase
            pairs = {
                "flops": (seen.flops["bfloat16"], true.flops["bfloat16"]),
                "moved_bytes": (seen.moved_bytes, true.moved_bytes),
                "kernels": (seen.kernels, true.kernels),
            }
            for what, (one, other) in pairs.items():
                found[true.phase, what] = max(abs(one / other - 1), found.get((true.phase, what), 0.0))
    return found


@pytest.fixture(name="lender", scope="module")
def one_lender() -> Pieces:
    return survey(follower(recomputed=True), SPACE, stretch_of({"model_type": "made_up", "num_hidden_layers": LAYERS}))


def test_many_micro_steps_take_what_each_trace_counts(lender: Pieces) -> None:
    assert {key: off for key, off in largest_error(lender, recomputed=True).items() if off > 1e-6} == {}


def test_a_family_that_is_looked_at_twice_takes_the_same_sums_in_its_own_amounts(lender: Pieces) -> None:
    config = {"model_type": "made_up", "num_hidden_layers": LAYERS}
    asked: list[Point] = []

    def follow(point: Point, layers: int | None) -> Trace:
        asked.append(point)
        return follower(recomputed=False)(point, layers)

    pieces = survey(follow, SPACE, stretch_of(config), lender, [point.micro_batch for point in SPACE])
    assert len(asked) <= 4
    assert {key: off for key, off in largest_error(pieces, recomputed=False).items() if off > 0.005} == {}
