"""Whatever is put in: an answer, or one of autotune's own errors in a sentence. Never a crash,
never a hang.

`python -m tests.fuzz` reads as many inputs as you like and prints how many it were.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.drive import crashes
from tests.fuzz.parsers import PARSERS

SHARE = 0.05
"""Share of each parser's inputs in the fast tests."""

SLOW_SHARE = 0.15
"""Share in the slow tests. All inputs: `make fuzz`, and `make test-long`."""


def test_together_they_read_a_hundred_thousand() -> None:
    assert sum(parser.inputs for parser in PARSERS.values()) >= 100_000


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_thousand(name: str, tmp_path: Path) -> None:
    assert crashes(name, tmp_path, seed=1, share=SHARE) == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [SLOW_SHARE, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PARSERS)
def test_many(
    name: str,
    share: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = crashes(name, tmp_path, seed=2, share=share)
    with capsys.disabled():
        print(f"\n{name}: {share * PARSERS[name].inputs:.0f} inputs, {len(failures)} crashes")
    assert failures == []
