"""Tests of many samples fail with the name of each sample that is wrong."""

from __future__ import annotations

import inspect

import pytest

from tests.every import for_each


def test_each_sample_is_checked_and_each_mistake_is_named() -> None:
    checked = []

    @for_each(["right", "wrong", "other", "worse"])
    def check(sample: str, limit: int) -> None:
        checked.append(sample)
        assert len(sample) == limit or not sample.startswith("w")

    with pytest.raises(AssertionError, match=r"2 of 4:\n'wrong'(.|\n)*'worse'"):
        check(limit=4)
    assert checked == ["right", "wrong", "other", "worse"]
    assert list(inspect.signature(check).parameters) == ["limit"]
    check(limit=5)


def test_another_error_is_none_of_the_check() -> None:
    @for_each([0])
    def check(sample: int) -> None:
        assert 1 / sample

    with pytest.raises(ZeroDivisionError):
        check()


def test_nothing_to_check_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="nothing to check"):
        for_each([])(lambda sample: None)
