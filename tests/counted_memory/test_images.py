"""Traced peaks of rows with images against an allocator's counts of the same steps on real
tensors.
"""

from __future__ import annotations

import pytest

from tests.counted_memory import counting
from tests.counted_memory.image_cases import CASES
from tests.counted_memory.test_counted import errors_of, report, run, too_far

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("light_environment"),
    pytest.mark.skipif(
        counting.WITHOUT_COMPILER is not None, reason=str(counting.WITHOUT_COMPILER)
    ),
]


def test_steps_with_images_match_the_prediction() -> None:
    errors = errors_of(CASES, run(list(CASES.values())))
    outside = too_far(errors)
    print(*report(errors), sep="\n")
    assert not outside, "\n".join(report(outside))
