"""Settings reported by a launched run, in each supported form."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.worker.launched_output import LaunchedSettings

HEAD = "2025-02-20 10:00:01.000 | INFO     | __main__:<module>:9 - --------- config key ---------  ------ value ------"
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
EVERY = ("seed", "pretrain", "critic_pretrain", "actor_learning_rate", "colocate_all", "grad_accum_dtype", "prompt_data")


def found(kind: str, *lines: str, names: tuple[str, ...]) -> dict[str, Any]:
    settings = LaunchedSettings({"kind": kind, "file": None}, str)
    for line in lines:
        settings.read_line(line)
    return settings.found(names)


def test_a_printed_table_ends_at_the_first_other_line() -> None:
    assert found("table", "seed   1", *TABLE, names=EVERY) == {
        "seed": 42, "pretrain": "Qwen/Qwen2.5-7B", "critic_pretrain": "", "actor_learning_rate": 5e-07, "colocate_all": True,
        "grad_accum_dtype": None,
    }  # fmt: skip


def test_a_printed_namespace_gives_dotted_names() -> None:
    train = SimpleNamespace(batch_size=128, lr=5e-06, stop=["a", "b)"], bound=float("inf"))
    line = str(SimpleNamespace(train=train, use_ms=False, ds=SimpleNamespace(lora=SimpleNamespace(rank=8))))
    names = ("train.batch_size", "train.lr", "train.stop", "train.bound", "use_ms", "ds.lora.rank", "ds.other")
    expected = {"train.batch_size": 128, "train.lr": 5e-06, "train.stop": ["a", "b)"], "use_ms": False, "ds.lora.rank": 8}
    assert found("namespace", "[Warning] something", line, names=names) == expected
    assert found("namespace", f"(main pid=7) {Namespace(use_ms=True)}", names=("use_ms",)) == {"use_ms": True}


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
    assert found("namespace", line, names=("a", "b", "s")) == {}


def test_a_json_file_is_read_after_the_run(tmp_path: Path) -> None:
    settings = LaunchedSettings({"kind": "json", "file": "{out}/args.json"}, lambda text: text.replace("{out}", str(tmp_path)))
    assert settings.found(("lr",)) == {}
    (tmp_path / "args.json").write_text(json.dumps({"lr": 0.5, "key": "secret"}))
    assert settings.found(("lr", "absent")) == {"lr": 0.5}
    (tmp_path / "args.json").write_text('{"lr": 0.')
    assert settings.found(("lr",)) == {}


def test_without_a_specification_no_settings_are_found() -> None:
    settings = LaunchedSettings(None, str)
    settings.read_line(TABLE[0])
    assert settings.found(("seed",)) == {}


def test_a_printed_yaml_document_is_collected_until_another_form_of_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's prefix is no part of it. The text goes to OmegaConf, which only the run's own Python needs to have."""
    given: list[str] = []

    def keep(text: str, names: object) -> dict[str, Any]:
        given.append(text)
        return {}

    monkeypatch.setattr("autotune.worker.launched_output.from_hydra", keep)
    ray = "\x1b[36m(skyrl_entrypoint pid=71)\x1b[0m "
    head = f"{ray}2026-07-20 10:00:01.000 | INFO     | skyrl.train.entrypoints.main_base:run:258 - data:"
    rows = [f"{ray}  train_data:", f"{ray}  - /a b/c", "(skyrl_entrypoint pid=71) trainer:", f"{ray}  ref: null"]
    found(
        "yaml", "before: it", head, *rows, f"{ray}2026-07-20 10:00:02 | INFO | x - Started: 'generate'", "  late: 1", names=("a",)
    )
    assert given == ["data:\n  train_data:\n  - /a b/c\ntrainer:\n  ref: null"]
