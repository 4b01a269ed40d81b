"""Figures and settings from the output of launched runs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.worker.launched_output import LaunchedSettings, MetricReader, Tail, line_source


def figures(spec: dict[str, Any], *lines: str, every: float = 2.0) -> list[tuple[int, float]]:
    reader = MetricReader(spec)
    readings = [reader.read(line, every * index) for index, line in enumerate(lines)]
    return [(reading.tokens, reading.seconds) for reading in readings if reading is not None]


@pytest.mark.parametrize(
    ("pattern", "lines", "expected"),
    [
        # Both are told.
        (
            r"(?P<tokens>\d+) tokens in (?P<seconds>[\d.]+) s",
            ["120 tokens in 0.5 s", "noise"],
            [(120, 0.5)],
        ),
        # Only a rate, or only tokens: the seconds are those since the line before, and the first
        # has none.
        (r"(?P<tokens_per_second>[\d.,]+) tok/s", ["1,000 tok/s", "1,500.5 tok/s"], [(3001, 2.0)]),
        (r"tokens=(?P<tokens>\d+)", ["tokens=10", "tokens=30"], [(30, 2.0)]),
        # A count that goes on over the run.
        (
            r"seen (?P<tokens_so_far>\d+)",
            ["seen 100", "seen 160", "seen 240"],
            [(60, 2.0), (80, 2.0)],
        ),
        # What is no number above nothing is no figure.
        (r"(?P<tokens_per_second>\S+) tok/s", ["nan tok/s", "inf tok/s", "0 tok/s", "x tok/s"], []),
    ],
)
def test_figures_by_pattern(
    pattern: str,
    lines: list[str],
    expected: list[tuple[int, float]],
) -> None:
    assert figures({"kind": "pattern", "line": pattern}, *lines) == expected


def test_figures_in_json_lines() -> None:
    assert figures(
        {"kind": "json"}, '{"tokens": 64, "seconds": 0.5}', "not json", "[1]", '{"loss": 1}'
    ) == [(64, 0.5)]
    spec = {
        "kind": "json",
        "under": "data",
        "times": 8,
        "keys": {"tokens_per_second": ["perf/throughput"], "seconds": ["s"]},
    }
    assert figures(spec, '{"step": 1, "data": {"perf/throughput": 10.0, "s": 3}}') == [(240, 3.0)]


def test_several_keys_add_up_and_a_missing_one_is_unknown() -> None:
    spec = {"kind": "json", "keys": {"seconds": ["generate", "train"], "tokens": ["n"]}}
    assert figures(spec, '{"generate": 1.0, "train": 2.0, "n": 6}') == [(6, 3.0)]
    assert figures(spec, '{"generate": 1.0, "n": 6}') == []


def test_figures_in_a_printed_dictionary() -> None:
    spec = {
        "kind": "python",
        "line": r"Global step \d+: (?P<record>\{.*\})",
        "keys": {"seconds": ["t"]},
        "tokens_each": 128,
    }
    assert figures(
        spec, "INFO Global step 3: {'t': 4.0, 'loss': None}", "Global step 4: {broken"
    ) == [(128, 4.0)]


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


HEAD = (
    "2025-02-20 10:00:01.000 | INFO     | __main__:<module>:9 - --------- config key --------- "
    " ------ value ------"
)
TABLE = [
    HEAD,
    "seed                        42",
    "pretrain                    Qwen/Qwen2.5-7B",
    "critic_pretrain",
    "actor_learning_rate         5e-07",
    "colocate_all                True",
    "adam_betas                  (0.9, 0.95)",
    "grad_accum_dtype            <class 'NoneType'>",
    "prompt_data                 <class 'omegaconf.listconfig.ListConfig'>",
    "2025-02-20 10:00:02.000 | INFO     | orz.ppo.trainer:fit:50 - seed 7",
    "seed                        43",
]
EVERY = (
    "seed",
    "pretrain",
    "critic_pretrain",
    "actor_learning_rate",
    "colocate_all",
    "grad_accum_dtype",
    "prompt_data",
)


def settings_in(kind: str, *lines: str, names: tuple[str, ...]) -> dict[str, Any]:
    settings = LaunchedSettings({"kind": kind, "file": None}, str)
    for line in lines:
        settings.read_line(line)
    return settings.reported_values(names)


def test_a_printed_table_ends_at_the_first_other_line() -> None:
    assert settings_in("table", "seed   1", *TABLE, names=EVERY) == {
        "seed": 42,
        "pretrain": "Qwen/Qwen2.5-7B",
        "critic_pretrain": "",
        "actor_learning_rate": 5e-07,
        "colocate_all": True,
        "grad_accum_dtype": None,
    }


def test_a_printed_namespace_gives_dotted_names() -> None:
    train = SimpleNamespace(
        batch_size=128,
        lr=5e-06,
        stop=["a", "b)"],
        bound=float("inf"),
    )
    line = str(
        SimpleNamespace(
            train=train,
            use_ms=False,
            ds=SimpleNamespace(lora=SimpleNamespace(rank=8)),
        )
    )
    names = (
        "train.batch_size",
        "train.lr",
        "train.stop",
        "train.bound",
        "use_ms",
        "ds.lora.rank",
        "ds.other",
    )
    expected = {
        "train.batch_size": 128,
        "train.lr": 5e-06,
        "train.stop": ["a", "b)"],
        "use_ms": False,
        "ds.lora.rank": 8,
    }
    assert settings_in("namespace", "[Warning] something", line, names=names) == expected
    assert settings_in(
        "namespace", f"(main pid=7) {Namespace(use_ms=True)}", names=("use_ms",)
    ) == {"use_ms": True}


@pytest.mark.parametrize(
    "line",
    [
        "namespace(a=1",
        "namespace(a=__import__('os').system('false'))",
        "namespace(a=open('/etc/passwd'), **b)",
        "namespace(" * 5000,
        "namespace(a=" + "-" * 100_000 + "1)",
        "in this namespace(s)",
    ],
)
def test_expressions_are_left_out_and_never_executed(line: str) -> None:
    assert settings_in("namespace", line, names=("a", "b", "s")) == {}


def test_a_json_file_is_read_after_the_run(tmp_path: Path) -> None:
    settings = LaunchedSettings(
        {"kind": "json", "file": "{out}/args.json"},
        lambda text: text.replace("{out}", str(tmp_path)),
    )
    assert settings.reported_values(("lr",)) == {}
    (tmp_path / "args.json").write_text(json.dumps({"lr": 0.5, "key": "secret"}))
    assert settings.reported_values(("lr", "absent")) == {"lr": 0.5}
    (tmp_path / "args.json").write_text('{"lr": 0.')
    assert settings.reported_values(("lr",)) == {}


def test_without_a_specification_no_settings_are_found() -> None:
    settings = LaunchedSettings(None, str)
    settings.read_line(TABLE[0])
    assert settings.reported_values(("seed",)) == {}


def test_a_printed_yaml_document_is_collected_until_another_form_of_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's prefix is no part of it. The text goes to OmegaConf, which only the run's own Python
    needs to have.
    """
    documents: list[str] = []

    def keep(text: str, names: object) -> dict[str, Any]:
        documents.append(text)
        return {}

    monkeypatch.setattr("autotune.worker.launched_output.from_hydra", keep)
    ray = "\x1b[36m(skyrl_entrypoint pid=71)\x1b[0m "
    head = (
        f"{ray}2026-07-20 10:00:01.000 | INFO     | skyrl.train.entrypoints.main_base:run:258 -"
        " data:"
    )
    rows = [
        f"{ray}  train_data:",
        f"{ray}  - /a b/c",
        "(skyrl_entrypoint pid=71) trainer:",
        f"{ray}  ref: null",
    ]
    settings_in(
        "yaml",
        "before: it",
        head,
        *rows,
        f"{ray}2026-07-20 10:00:02 | INFO | x - Started: 'generate'",
        "  late: 1",
        names=("a",),
    )
    assert documents == ["data:\n  train_data:\n  - /a b/c\ntrainer:\n  ref: null"]
