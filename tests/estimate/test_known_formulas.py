"""Formulas of one family, recognised in another from two examples."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.estimate.screening.blocks import Floats
from autotune.estimate.screening.formulas import KnownFormulas

MANY = np.array([[1, 64, 64, 3], [8, 80, 512, 3], [4, 256, 104, 4], [8, 176, 264, 5], [1, 256, 424, 4], [5, 120, 512, 3]], float)
TWO = MANY[[0, 2]]
ELSEWHERE = np.array([[7.0, 200.0, 300.0, 3.0]])


def sizes(points: Floats) -> Floats:
    batch, prompt, completion, micro_steps = points.T
    length = prompt + completion
    return np.stack([
        3584 * batch * length, 2 * batch * (length - 1) ** 2, 8 * batch * completion * micro_steps, 4 * (prompt - 1) + 7 * batch,
        np.full(len(points), 77.0), 48 * batch * (length - 1),
    ])  # fmt: skip


def test_two_examples_suffice_for_known_formulas() -> None:
    formulas, _, exactly = KnownFormulas().fit(MANY, sizes(MANY))
    assert exactly.all()
    formulas, coefficients, exactly = formulas.fit(TWO, sizes(TWO))
    assert exactly.all()
    found = coefficients @ formulas.basis.values(ELSEWHERE).T
    np.testing.assert_allclose(found, sizes(ELSEWHERE), rtol=1e-9)


def test_a_new_formula_is_a_single_term_or_not_exact() -> None:
    formulas, _, _ = KnownFormulas().fit(MANY, sizes(MANY))
    new = np.stack([10 * TWO[:, 0] * TWO[:, 2], 11 * TWO[:, 0] + 5 * TWO[:, 1] + 13 * TWO[:, 2] ** 2])
    formulas, coefficients, exactly = formulas.fit(TWO, new)
    assert exactly.tolist() == [True, False]
    found = coefficients[0] @ formulas.basis.values(ELSEWHERE)[0]
    assert found == pytest.approx(10 * 7 * 300)


def test_new_formulas_are_added_to_the_known_ones() -> None:
    formulas, _, _ = KnownFormulas().fit(MANY[:, :], sizes(MANY)[:3])
    wider, _, _ = formulas.fit(MANY, sizes(MANY))
    assert len(wider.coefficients) > len(formulas.coefficients)
    assert wider.fit(TWO, sizes(TWO))[2].all()
    assert wider.basis.terms[: len(formulas.basis.terms)] == formulas.basis.terms
