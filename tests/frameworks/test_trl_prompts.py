"""Measuring and filtering prompts in the training environment, on real tokenizers and datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.errors import BadInput, TrainingEnvironmentError
from autotune.core.job import Model
from autotune.frameworks.dataset_measurement import measure_prompts
from autotune.worker.dataset_sizes import lengths_of, percentile, prompt_figures
from autotune.worker.synthetic import tiny_config, write_model_folder
from tests.frameworks.conftest import make_task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("prompts") / "model", tiny_config())


def rows_in(
    folder: Path,
    name: str,
    prompts: list[Any],
) -> None:
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": prompt, "answer": number} for number, prompt in enumerate(prompts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(
    model: Path,
    dataset: dict[str, Any],
    limit: int | None,
    out: Path | None = None,
) -> dict[str, Any]:
    return prompt_figures(
        {
            "model": str(model),
            "dataset": dataset,
            "limit": limit,
            "out": None if out is None else str(out),
        }
    )


PROMPTS = ["word " * n for n in range(1, 41)]


def test_plain_prompts_are_measured_by_the_tokenizer(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    rows_in(tmp_path / "d", "train", PROMPTS)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    lengths = sorted(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    measured = ask(model, {"dataset_name": str(tmp_path / "d")}, lengths[19])
    assert (
        measured["rows"] == 40
        and measured["longest_prompt"] == lengths[-1]
        and measured["percentiles"]["50"] == lengths[19]
    )
    assert (
        measured["kept"] == sum(length <= lengths[19] for length in lengths)
        and measured["dropped"] == 40 - measured["kept"]
    )


def test_chat_prompts_count_the_template(model: Path, tmp_path: Path) -> None:
    rows_in(tmp_path / "plain", "train", PROMPTS)
    rows_in(
        tmp_path / "chat", "train", [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    )
    plain, chat = (
        ask(model, {"dataset_name": str(tmp_path / name)}, None) for name in ("plain", "chat")
    )
    assert chat["longest_prompt"] > plain["longest_prompt"]


def test_the_filtered_dataset_loads_again_under_its_own_splits(model: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    rows_in(tmp_path / "d", "train", PROMPTS)
    rows_in(tmp_path / "d", "test", PROMPTS[:5])
    limit = ask(model, {"dataset_name": str(tmp_path / "d")}, None)["percentiles"]["50"]
    measured = ask(model, {"dataset_name": str(tmp_path / "d")}, limit, tmp_path / "out")
    again = load_dataset(measured["dataset_name"])
    assert {name: len(split) for name, split in again.items()} == {
        name: counts["kept"] for name, counts in measured["splits"].items()
    }
    assert again["train"].column_names == ["prompt", "answer"] and set(again) == {"train", "test"}
    assert (
        ask(model, {"dataset_name": measured["dataset_name"]}, None)["longest_prompt"]
        == measured["longest_kept"]
        <= limit
    )
    assert not list((tmp_path / "out").rglob(".*"))


def test_a_split_with_a_name_of_its_own(model: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    (tmp_path / "d" / "data").mkdir(parents=True)
    rows_in(tmp_path / "d" / "data", "train_rl-00000-of-00001", PROMPTS)
    dataset = {"dataset_name": str(tmp_path / "d"), "dataset_train_split": "train_rl"}
    measured = ask(model, dataset, 1000, tmp_path / "out")
    assert len(load_dataset(measured["dataset_name"])["train_rl"]) == 40
    with pytest.raises(ValueError, match=r"no split 'train'; it has \['train_rl'\]"):
        ask(model, {"dataset_name": str(tmp_path / "d")}, None)


def test_a_mixture_is_filtered_as_trl_mixes_it(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        rows_in(tmp_path / name, "train", PROMPTS)
    parts = [{"path": str(tmp_path / name)} for name in ("one", "two")]
    measured = ask(model, {"datasets": parts, "test_split_size": 0.25}, None, tmp_path / "out")
    assert measured["splits"]["train"]["rows"] == 60 and measured["splits"]["test"]["rows"] == 20


def test_a_limit_that_leaves_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    rows_in(tmp_path / "d", "train", PROMPTS)
    with pytest.raises(ValueError, match="no prompt is within 0 tokens; the shortest has"):
        ask(model, {"dataset_name": str(tmp_path / "d")}, 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dataset_without_rows_is_refused() -> None:
    from datasets import Dataset

    with pytest.raises(ValueError, match="the dataset has no rows"):
        lengths_of(Dataset.from_dict({"prompt": ["gone"]}).select([]), None, {})
    with pytest.raises(ValueError, match=r"no column 'prompt'; it has \['question'\]"):
        lengths_of(Dataset.from_dict({"question": ["why"]}), None, {})


@given(st.lists(st.integers(1, 500), min_size=1), st.sampled_from([50, 90, 95, 99, 100]))
def test_a_percentile_is_the_smallest_length_that_covers_its_share(
    lengths: list[int], share: int
) -> None:
    quantile = percentile(sorted(lengths), share)
    covered = sum(length <= quantile for length in lengths)
    below = sum(length < quantile for length in lengths)
    assert quantile in lengths and covered * 100 >= share * len(lengths) > below * 100


def test_the_parent_hears_what_is_wrong(model: Path, tmp_path: Path) -> None:
    task = make_task(
        model=Model(
            name="m",
            config={},
            folder=model,
            origin="local folder",
        )
    )
    with pytest.raises(BadInput, match="could not be measured"):
        measure_prompts(task, {"dataset_name": str(tmp_path / "nothing")}, limit=5, out=None)
    task = make_task(python=tmp_path / "no-python")
    with pytest.raises(TrainingEnvironmentError, match="cannot be started"):
        measure_prompts(task, {"dataset_name": "x"}, limit=5, out=None)
