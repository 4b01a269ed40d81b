"""Traced peaks of rows with images against an allocator's counts of the same steps on real
tensors.
"""

from __future__ import annotations

import pytest

from tests.counted_memory import counting
from tests.counted_memory.image_cases import CASES
from tests.counted_memory.test_counted import CLOSE, off, report, run

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        counting.WITHOUT_COMPILER is not None, reason=str(counting.WITHOUT_COMPILER)
    ),
]


def test_steps_with_images_match_the_prediction() -> None:
    errors = {
        name: off(answer) for name, answer in zip(CASES, run(list(CASES.values())), strict=True)
    }
    outside = {
        name: by_phase
        for name, by_phase in errors.items()
        if max(map(abs, by_phase.values())) > CLOSE
    }
    print(*report(errors), sep="\n")
    assert not outside, "\n".join(report(outside))
