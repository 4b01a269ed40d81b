"""The comparison of two checkouts: which fields differ, and what a case is asked of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from before_after import LINES, Side, difference, leaves, lines

BEFORE = {
    "exit_code": 0,
    "document": {
        "fits": True,
        "peak_memory_bytes": {"value": 1000, "low": 900},
        "phases": [{"name": "load"}],
        "removed": 1,
    },
}
AFTER = {
    "exit_code": 3,
    "document": {
        "fits": False,
        "peak_memory_bytes": {"value": 1010, "low": 900},
        "phases": [{"name": "load"}, {"name": "rollout"}],
        "origins": {"beta": None},
    },
}


def test_values_are_compared_by_their_paths() -> None:
    assert dict(leaves(BEFORE["document"])) == {
        "fits": True,
        "peak_memory_bytes.value": 1000,
        "peak_memory_bytes.low": 900,
        "phases[0].name": "load",
        "removed": 1,
    }


def test_what_differs_is_listed_or_counted() -> None:
    changes = difference("01", BEFORE, AFTER)
    assert changes.shown == [
        "exit code 0 → 3",
        "fits True → False",
        "device peak 1,000 → 1,010 (+1.00%)",
    ]
    assert changes.hidden == 1  # `removed`
    assert changes.added == 2  # the second phase, and `origins`


def test_equal_answers_have_no_difference() -> None:
    equal = difference("01", BEFORE, BEFORE)
    assert (equal.shown, equal.hidden, equal.added) == ([], 0, 0)


def test_fifty_command_lines_differ_from_each_other() -> None:
    stated = lines()
    assert len(set(stated.values())) == len(stated) == 50
    assert LINES.read_text().startswith("#")


def test_a_stored_answer_is_not_asked_for_again(tmp_path: Path) -> None:
    kept_answer = {"name": "01", "document": {"fits": True}}
    stored = tmp_path / "lines-before.jsonl"
    stored.write_text(json.dumps(kept_answer) + '\n{"name": "02", "docu')  # ended while writing
    side = Side(
        name="before",
        checkout=tmp_path,
        python=sys.executable,
        folder=tmp_path,
    )
    answers = side.answers("lines", {"01": "predict"}, tmp_path, tmp_path)
    assert answers == {"01": kept_answer}
