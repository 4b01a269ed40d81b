"""Speed figures from a run's own output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.worker.launched_output import MetricReader, Tail, line_source


def figures(spec: dict[str, Any], *lines: str, every: float = 2.0) -> list[tuple[int, float]]:
    reader = MetricReader(spec)
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
def test_figures_by_pattern(pattern: str, lines: list[str], expected: list[tuple[int, float]]) -> None:
    assert figures({"kind": "pattern", "line": pattern}, *lines) == expected


def test_figures_in_json_lines() -> None:
    assert figures({"kind": "json"}, '{"tokens": 64, "seconds": 0.5}', "not json", "[1]", '{"loss": 1}') == [(64, 0.5)]
    spec = {"kind": "json", "under": "data", "times": 8, "keys": {"tokens_per_second": ["perf/throughput"], "seconds": ["s"]}}
    assert figures(spec, '{"step": 1, "data": {"perf/throughput": 10.0, "s": 3}}') == [(240, 3.0)]


def test_several_keys_add_up_and_a_missing_one_is_unknown() -> None:
    spec = {"kind": "json", "keys": {"seconds": ["generate", "train"], "tokens": ["n"]}}
    assert figures(spec, '{"generate": 1.0, "train": 2.0, "n": 6}') == [(6, 3.0)]
    assert figures(spec, '{"generate": 1.0, "n": 6}') == []


def test_figures_in_a_printed_dictionary() -> None:
    spec = {"kind": "python", "line": r"Global step \d+: (?P<record>\{.*\})", "keys": {"seconds": ["t"]}, "tokens_each": 128}
    assert figures(spec, "INFO Global step 3: {'t': 4.0, 'loss': None}", "Global step 4: {broken") == [(128, 4.0)]


def test_only_lines_appended_to_a_file_count(tmp_path: Path) -> None:
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


def test_a_metrics_file_may_appear_later(tmp_path: Path) -> None:
    listen = line_source({"file": "{autotune_run_folder}/m.jsonl"}, tmp_path)
    assert listen(["printed"]) == []
    (tmp_path / "m.jsonl").write_text("told\n")
    assert listen(["printed"]) == ["told"]
    assert line_source({"file": None}, tmp_path)(["printed"]) == ["printed"]


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_nan_in_a_printed_dictionary_leaves_other_figures_readable(word: str) -> None:
    line = f"Global step 2: {{'kl': {word}, 'note': 'nan of info', 'tokens': 640, 'seconds': 2.0}}"
    spec = {"kind": "python", "line": r"Global step \d+: (?P<record>\{.*\})"}
    assert figures(spec, line) == [(640, 2.0)]
