"""Sums that one family knows, recognised in another from two examples."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.predict.pieces.monomials import Floats
from autotune.predict.pieces.vocabulary import Vocabulary

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


def test_two_examples_do_for_what_is_known() -> None:
    first = Vocabulary.empty().say(MANY, sizes(MANY))
    assert first.exactly.all()
    said = first.vocabulary.say(TWO, sizes(TWO))
    assert said.exactly.all()
    found = said.coefficients @ said.vocabulary.basis.values(ELSEWHERE).T
    np.testing.assert_allclose(found, sizes(ELSEWHERE), rtol=1e-9)


def test_what_is_new_is_a_single_term_or_said_to_be_a_guess() -> None:
    vocabulary = Vocabulary.empty().say(MANY, sizes(MANY)).vocabulary
    new = np.stack([10 * TWO[:, 0] * TWO[:, 2], 11 * TWO[:, 0] + 5 * TWO[:, 1] + 13 * TWO[:, 2] ** 2])
    said = vocabulary.say(TWO, new)
    assert said.exactly.tolist() == [True, False]
    found = said.coefficients[0] @ said.vocabulary.basis.values(ELSEWHERE)[0]
    assert found == pytest.approx(10 * 7 * 300)


def test_what_was_learnt_is_known_from_then_on() -> None:
    vocabulary = Vocabulary.empty().say(MANY[:, :], sizes(MANY)[:3]).vocabulary
    wider = vocabulary.say(MANY, sizes(MANY)).vocabulary
    assert len(wider.known) > len(vocabulary.known)
    assert wider.say(TWO, sizes(TWO)).exactly.all()
    assert wider.basis.terms[: len(vocabulary.basis.terms)] == vocabulary.basis.terms
