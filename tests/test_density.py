"""The density of the code only falls: today's counts against the limits of tests/density.json."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests import density

LIMITS = density.read_limits()
counts = functools.cache(density.count_rooms)
"""Counted by the process that runs these tests: each process collects them."""

SAMPLE = '''\
"""A docstring with one and found, which do not count."""

found = [one for one in range(3)]  # found
total = sum(found) if found else 0
'''


def test_a_sample_is_counted_as_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(SAMPLE)
    assert density.count_file(file) == density.Count(
        code_lines=2,
        # found = [ one for one in range ( 3 ) ]; total = sum ( found ) if found else 0
        tokens=12 + 10,
        comprehensions=1,
        conditionals=1,
        vague_names=5,
    )


def test_every_room_has_limits() -> None:
    assert set(counts()) == set(LIMITS), "python -m tests.density --renew"


@pytest.mark.parametrize("room", LIMITS)
def test_no_count_grows(room: str) -> None:
    rates = counts()[room].rates()
    grown = {name: rate for name, rate in rates.items() if rate > LIMITS[room][name]}
    assert not grown, f"above tests/density.json: {LIMITS[room]}"
