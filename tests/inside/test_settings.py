"""What a launched run says of its own settings, in each of the ways in which frameworks say it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.inside.settings import Settings

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


def heard(kind: str, *lines: str, asked: tuple[str, ...]) -> dict[str, Any]:
    settings = Settings({"kind": kind, "file": None}, str)
    for line in lines:
        settings.hear(line)
    return settings.found(asked)


def test_a_printed_table_ends_where_its_lines_are_no_rows_any_more() -> None:
    assert heard("table", "seed   1", *TABLE, asked=EVERY) == {
        "seed": 42, "pretrain": "Qwen/Qwen2.5-7B", "critic_pretrain": "", "actor_learning_rate": 5e-07, "colocate_all": True,
        "grad_accum_dtype": None,
    }  # fmt: skip


def test_a_printed_namespace_has_its_settings_under_dotted_names() -> None:
    train = SimpleNamespace(batch_size=128, lr=5e-06, stop=["a", "b)"], bound=float("inf"))
    line = str(SimpleNamespace(train=train, use_ms=False, ds=SimpleNamespace(lora=SimpleNamespace(rank=8))))
    asked = ("train.batch_size", "train.lr", "train.stop", "train.bound", "use_ms", "ds.lora.rank", "ds.other")
    expected = {"train.batch_size": 128, "train.lr": 5e-06, "train.stop": ["a", "b)"], "use_ms": False, "ds.lora.rank": 8}
    assert heard("namespace", "[Warning] something", line, asked=asked) == expected
    assert heard("namespace", f"(main pid=7) {Namespace(use_ms=True)}", asked=("use_ms",)) == {"use_ms": True}


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
def test_what_is_no_plain_value_is_left_out_and_never_run(line: str) -> None:
    assert heard("namespace", line, asked=("a", "b", "s")) == {}


def test_a_file_of_json_is_looked_into_when_the_run_has_ended(tmp_path: Path) -> None:
    settings = Settings({"kind": "json", "file": "{out}/args.json"}, lambda text: text.replace("{out}", str(tmp_path)))
    assert settings.found(("lr",)) == {}
    (tmp_path / "args.json").write_text(json.dumps({"lr": 0.5, "key": "secret"}))
    assert settings.found(("lr", "absent")) == {"lr": 0.5}
    (tmp_path / "args.json").write_text('{"lr": 0.')
    assert settings.found(("lr",)) == {}


def test_nothing_is_said_where_nothing_says_it() -> None:
    settings = Settings(None, str)
    settings.hear(TABLE[0])
    assert settings.found(("seed",)) == {}
