"""One test for many samples: each is checked, and every one that fails is named.

A test of its own for each sample costs more than the check: pytest sets up and reports each one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[..., None]


def for_each(samples: Iterable[Any]) -> Callable[[Check], Check]:
    """Make a test of a check, whose first argument is each of the samples; pytest gives others."""
    all_samples = list(samples)

    def test_of(check: Check) -> Check:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            mistakes = []
            for sample in all_samples:
                try:
                    check(sample, **fixtures)
                except AssertionError as error:
                    mistakes.append(f"{sample!r:.200}: {error}")
            assert not mistakes, f"{len(mistakes)} of {len(all_samples)}:\n" + "\n".join(mistakes)

        assert all_samples, "there is nothing to check"
        _, *fixtures = inspect.signature(check).parameters.values()
        vars(test)["__signature__"] = inspect.Signature(fixtures)
        return test

    return test_of
