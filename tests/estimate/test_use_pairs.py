"""Uses of modules in the full model, from those of two short ones. Numbers are worked out by hand:
a layer has ten modules, the short model two layers, the longer one three and the full one five.
"""

from __future__ import annotations

import pytest

from autotune.estimate.screening.blocks import INDEX
from autotune.estimate.screening.points import NotUniform
from autotune.estimate.screening.use_pairs import UsePair, pairs_in_group, pairs_outside
from autotune.estimate.sharding.module_uses import UseKind

COPIES = 3  # of the layer, that the short model lacks


def reads(*modules: int) -> list[tuple[int, ...]]:
    return [(7, UseKind.READ, module) for module in modules]


def passes(*modules: int) -> list[tuple[int, ...]]:
    return [(7, UseKind.FORWARD, module) for module in modules]


def modules_of(pairs: list[UsePair]) -> list[int]:
    modules = []
    for pair in pairs:
        step = pair.upper[INDEX] - pair.lower[INDEX]
        modules.append(pair.lower[INDEX] + pair.instance * step)
    return modules


def test_a_series_over_the_layers_goes_on_in_the_full_model() -> None:
    short = [*passes(1), *reads(2, 8, 12, 18), *passes(40)]
    longer = [*passes(1), *reads(2, 8, 12, 18, 22, 28), *passes(50)]
    pairs = list(pairs_outside(short, longer, COPIES))
    assert modules_of(pairs) == [
        1,
        2,
        8,
        12,
        18,
        22,
        28,
        32,
        38,
        42,
        48,
        70,
    ]


def test_without_a_series_only_what_is_behind_the_layers_moves() -> None:
    pairs = list(pairs_outside(passes(1, 40), passes(1, 50), COPIES))
    assert modules_of(pairs) == [1, 70]


def test_a_layer_uses_its_own_modules() -> None:
    pairs = list(pairs_in_group(passes(22, 23), passes(12, 13), passes(22, 23), instance=3))
    assert modules_of(pairs) == [42, 43]


@pytest.mark.parametrize(
    ("short", "longer"),
    [
        (passes(2, 12), passes(2, 12, 22)),  # a module that runs is not read
        (reads(2, 12), reads(2, 12, 25)),  # not a layer further on
        (
            reads(2, 8, 12, 18),
            reads(2, 8, 12, 18, 22, 29),
        ),
        (reads(2, 12), [*reads(2, 12), *passes(22)]),
        (reads(2, 12), reads(2)),
    ],
    ids=str,
)
def test_other_uses_have_no_series(
    short: list[tuple[int, ...]],
    longer: list[tuple[int, ...]],
) -> None:
    with pytest.raises(NotUniform):
        list(pairs_outside(short, longer, COPIES))
