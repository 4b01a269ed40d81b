"""Lengths of rows of supervised fine-tuning, on real tokenizers and datasets, and their report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune import frameworks
from autotune.core.dataset import LengthPercentile, RowLengths
from autotune.core.errors import BadInput
from autotune.core.job import Model, Task
from autotune.frameworks.trl.requests import dataset_of
from autotune.report.document_rows import data_row
from autotune.report.job_text import data_lines
from autotune.worker.dataset_sizes import load_splits
from autotune.worker.synthetic import tiny_config, write_model_folder
from autotune.worker.trl.training_data import user_dataset
from tests.frameworks.conftest import make_task

ROWS: list[dict[str, object]] = [{"text": "word " * (10 * number)} for number in range(1, 101)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("rows") / "model", tiny_config())


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_of(
    framework: str,
    model: Path,
    dataset: Path | str | None,
) -> Task:
    about = Model(
        name=str(model),
        config={},
        folder=model,
        origin="local folder",
    )
    return make_task(
        method="sft",
        framework=framework,
        model=about,
        dataset=None if dataset is None else str(dataset),
    )


@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize(
    "framework",
    [
        "trl",
        pytest.param("swift", marks=pytest.mark.slow),
        pytest.param("unsloth", marks=pytest.mark.slow),
    ],
)
def test_what_a_limit_drops_is_counted(
    framework: str,
    model: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    end = tokenizer.eos_token
    lengths = sorted(
        len(tokenizer(f"{row['text']}{end}", add_special_tokens=False)["input_ids"]) for row in ROWS
    )
    task = task_of(framework, model, written(tmp_path / "rows.jsonl", ROWS))
    measured = frameworks.trainer(framework, "sft").row_lengths(task)
    assert measured is not None
    assert (measured.rows, measured.looked_at, measured.tokens) == (100, 100, sum(lengths))
    at = {percentile.share: percentile for percentile in measured.percentiles}
    assert at[90].length == lengths[89] and at[90].longer == 10
    assert (
        at[90].left_out == sum(lengths[90:]) and at[90].cut == sum(lengths[90:]) - 10 * lengths[89]
    )
    assert (at[100].length, at[100].longer, at[100].cut) == (lengths[-1], 0, 0)


@pytest.mark.slow
def test_conversations_count_their_template(model: Path, tmp_path: Path) -> None:
    conversation = [
        {"role": "user", "content": "word " * 5},
        {"role": "assistant", "content": "word"},
    ]
    task = task_of("trl", model, written(tmp_path / "rows.jsonl", [{"messages": conversation}] * 3))
    plain = task_of(
        "trl",
        model,
        written(tmp_path / "plain.jsonl", [{"prompt": "word " * 5, "completion": "word"}] * 3),
    )
    trainer = frameworks.trainer("trl", "sft")
    with_template, without = trainer.row_lengths(task), trainer.row_lengths(plain)
    assert with_template is not None and without is not None
    assert with_template.tokens > without.tokens


@pytest.mark.slow
def test_what_cannot_be_read_says_why(model: Path, tmp_path: Path) -> None:
    task = task_of("swift", model, written(tmp_path / "rows.jsonl", [{"other": 1}]))
    with pytest.raises(BadInput, match="they have \\['other'\\]"):
        frameworks.trainer("swift", "sft").row_lengths(task)


def test_without_a_dataset_nothing_is_measured(model: Path) -> None:
    assert frameworks.trainer("trl", "sft").row_lengths(task_of("trl", model, None)) is None
    assert not list(data_lines(None)) and data_row(None) is None


def test_it_is_told_in_lines_and_in_the_document() -> None:
    percentiles = []
    for share, longer in ((50, 50), (75, 25), (90, 10), (100, 0)):
        percentile = LengthPercentile(
            share=share,
            length=share,
            longer=longer,
            left_out=1,
            cut=1,
        )
        percentiles.append(percentile)
    measured = RowLengths(
        rows=100,
        looked_at=100,
        tokens=1000,
        percentiles=tuple(percentiles),
    )
    text, row = "\n".join(data_lines(measured)), data_row(measured)
    assert "100 rows" in text and "10.0% of rows" in text
    assert (
        row is not None
        and row["percentiles"][2]["share"] == 90
        and row["percentiles"][2]["rows_longer"] == 10
    )


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_rows_is_loaded_by_probes_and_by_trl(suffix: str, tmp_path: Path) -> None:
    """`load_dataset` takes the path of a file for a name on the hub."""
    from datasets import Dataset

    path = tmp_path / f"rows.{suffix}"
    rows = Dataset.from_list(ROWS)
    {"csv": rows.to_csv, "parquet": rows.to_parquet}.get(suffix, rows.to_json)(str(path))
    dataset_settings = {"dataset_config": "main", "dataset_train_split": "train_sft"}
    task = make_task(
        method="grpo",
        dataset=str(path),
        user_settings=dataset_settings,
    )
    description = dataset_of(task)
    assert description is not None and "dataset_name" not in description
    assert user_dataset(description)["text"] == [row["text"] for row in ROWS]
    assert load_splits(dict(description))["train"].num_rows == len(ROWS)
