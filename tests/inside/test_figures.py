"""Speed out of a run's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.inside.figures import Reader, Tail, listener


def figures(spec: dict[str, Any], *lines: str, every: float = 2.0) -> list[tuple[int, float]]:
    reader = Reader(spec)
    found = [reader.read(line, every * index) for index, line in enumerate(lines)]
    return [(one.tokens, one.seconds) for one in found if one is not None]


@pytest.mark.parametrize(
    ("pattern", "lines", "expected"),
    [
        # Both are told.
        (r"(?P<tokens>\d+) tokens in (?P<seconds>[\d.]+) s", ["120 tokens in 0.5 s", "noise"], [(120, 0.5)]),
        # Only a rate, or only tokens: the seconds are those since the line before, and the first has none.
        (r"(?P<tokens_per_second>[\d.,]+) tok/s", ["1,000 tok/s", "1,500.5 tok/s"], [(3001, 2.0)]),
        (r"tokens=(?P<tokens>\d+)", ["tokens=10", "tokens=30"], [(30, 2.0)]),
        # A count that goes on over the run.
        (r"seen (?P<tokens_so_far>\d+)", ["seen 100", "seen 160", "seen 240"], [(60, 2.0), (80, 2.0)]),
        # What is no number above nothing is no figure.
        (r"(?P<tokens_per_second>\S+) tok/s", ["nan tok/s", "inf tok/s", "0 tok/s", "x tok/s"], []),
    ],
)
def test_lines_that_a_pattern_finds(pattern: str, lines: list[str], expected: list[tuple[int, float]]) -> None:
    assert figures({"kind": "pattern", "line": pattern}, *lines) == expected


def test_json_lines_under_their_own_names_and_others() -> None:
    assert figures({"kind": "json"}, '{"tokens": 64, "seconds": 0.5}', "not json", "[1]", '{"loss": 1}') == [(64, 0.5)]
    spec = {"kind": "json", "under": "data", "times": 8, "keys": {"tokens_per_second": ["perf/throughput"], "seconds": ["s"]}}
    assert figures(spec, '{"step": 1, "data": {"perf/throughput": 10.0, "s": 3}}') == [(240, 3.0)]


def test_several_keys_add_up_and_one_that_is_missing_is_not_taken_for_nothing() -> None:
    spec = {"kind": "json", "keys": {"seconds": ["generate", "train"], "tokens": ["n"]}}
    assert figures(spec, '{"generate": 1.0, "train": 2.0, "n": 6}') == [(6, 3.0)]
    assert figures(spec, '{"generate": 1.0, "n": 6}') == []


def test_a_dictionary_as_python_prints_it() -> None:
    spec = {"kind": "python", "line": r"Global step \d+: (?P<record>\{.*\})", "keys": {"seconds": ["t"]}, "tokens_each": 128}
    assert figures(spec, "INFO Global step 3: {'t': 4.0, 'loss': None}", "Global step 4: {broken") == [(128, 4.0)]


def test_only_what_is_added_to_a_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("an earlier run's\n")
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert list(tail.lines()) == ["two"]
    path.write_text("anew\n")
    assert list(tail.lines()) == ["anew"]


def test_a_file_in_the_runs_own_folder_need_not_be_there_yet(tmp_path: Path) -> None:
    listen = listener({"file": "{out}/m.jsonl"}, tmp_path)
    assert listen(["printed"]) == []
    (tmp_path / "m.jsonl").write_text("told\n")
    assert listen(["printed"]) == ["told"]
    assert listener({"file": None}, tmp_path)(["printed"]) == ["printed"]


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_a_figure_that_is_no_number_costs_a_printed_dictionary_nothing_else(word: str) -> None:
    line = f"Global step 2: {{'kl': {word}, 'note': 'nan of info', 'tokens': 640, 'seconds': 2.0}}"
    spec = {"kind": "python", "line": r"Global step \d+: (?P<record>\{.*\})"}
    assert figures(spec, line) == [(640, 2.0)]
