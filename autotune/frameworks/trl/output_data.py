"""Data of the written run: the filtered dataset or a placeholder, and the reward functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.files import write_atomically
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks.base import count_of
from autotune.frameworks.dataset_measurement import filter_prompts
from autotune.frameworks.trl.settings import ranks_of

DATASET_NAME = "dataset"
PROMPTS_NAME = "prompts.json"
PLACEHOLDER_NAME = "placeholder"

PLACEHOLDER_REWARD = "get_soft_overlong_punishment"
"""Reward of TRL that is 0 below 1024 tokens, so that training has no effect."""

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "sft": ("text",),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion"),
    "reward": ("chosen", "rejected"),
}
"""Method -> columns of its rows; the default is a prompt."""

DATASET_SETTINGS = frozenset(
    {
        "datasets",
        "dataset_name",
        "dataset_config",
        "dataset_streaming",
        "streaming",
        "test_split_size",
    }
)


@dataclass
class OutputData:
    """Keys of the YAML for data and rewards, and the files that they name."""

    keys: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    own_dataset: str | None = None


def prepare_data(
    candidate: Candidate,
    task: Task,
    folder: Path,
    home: Path,
    dataset: Mapping[str, object] | None,
) -> OutputData:
    """Write the data into `folder`, and name it below `home`."""
    data = OutputData()
    if dataset is None:
        _write_placeholder(data, task, folder, home)
    elif generates(candidate):
        _write_filtered(data, candidate, task, folder, home, dataset)
    else:
        data.keys.update(dataset)
        if candidate.settings.get("max_length", 0) is None:
            data.notes.append(
                "NOT TRUNCATED: without padding the trainer truncates no rows. Remove longer rows"
                " from the dataset yourself."
            )
    if generates(candidate):
        _name_rewards(data, task)
    return data


def generates(candidate: Candidate) -> bool:
    """Return True if the method generates completions to prompts; others train on whole rows."""
    return "num_generations" in candidate.settings


# 1. Placeholder.


def _write_placeholder(
    data: OutputData,
    task: Task,
    folder: Path,
    home: Path,
) -> None:
    """Write a few rows, since TRL refuses a file without a dataset."""
    rows = _placeholder_rows(task.workload.method)
    lines = [json.dumps(row) + "\n" for row in rows]
    path = folder / PLACEHOLDER_NAME / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(lines).encode())
    data.paths.append(path)
    data.keys["dataset_name"] = str(home / PLACEHOLDER_NAME)
    data.own_dataset = PLACEHOLDER_NAME
    unit = "row" if task.workload.method in _COLUMNS else "prompt"
    data.notes.append(
        f"PLACEHOLDER dataset_name: replace it by your own, with no {unit} longer than the limit"
        " above."
    )


def _placeholder_rows(method: str) -> Iterator[dict[str, object]]:
    columns = _COLUMNS.get(method, ("prompt",))
    for first in range(32):
        for second in range(32):
            row: dict[str, object] = {}
            for column in columns:
                row[column] = f"What is {first} plus {second}? ({column})"
            if method == "kto":
                row["label"] = True
            yield row


# 2. Filtered dataset.


def _write_filtered(
    data: OutputData,
    candidate: Candidate,
    task: Task,
    folder: Path,
    home: Path,
    dataset: Mapping[str, object],
) -> None:
    """Write the dataset without prompts that are longer than the limit."""
    limit = candidate.settings["max_prompt_length"]
    assert isinstance(limit, int)
    try:
        counts = filter_prompts(task, dataset, limit=limit, out=folder / DATASET_NAME)
    except BadInput as error:
        # An unreadable dataset must not discard the result of a search: the file names what is
        # missing.
        counts = {"error": str(error), "limit": limit}
        data.keys.update(dataset)
        data.notes.append(f"NOT FILTERED: keep prompts within {limit} tokens yourself. {error}")
    else:
        counts["dataset_name"] = str(home / DATASET_NAME)
        data.keys["dataset_name"] = counts["dataset_name"]
        for name in ("dataset_train_split", "dataset_test_split"):
            if name in dataset:
                data.keys[name] = dataset[name]
        data.own_dataset = DATASET_NAME
        data.paths += sorted((folder / DATASET_NAME).rglob("*.parquet"))
        data.notes.append(
            f"The dataset contains the {counts['kept']} of {counts['rows']} rows with prompts of at"
            f" most {limit} tokens."
        )
        data.notes += _too_few_rows(counts["kept"], candidate, task)
    path = folder / PROMPTS_NAME
    text = json.dumps(counts, indent=2) + "\n"
    write_atomically(path, text.encode())
    data.paths.append(path)


def _too_few_rows(
    rows: object,
    candidate: Candidate,
    task: Task,
) -> Iterator[str]:
    if "steps_per_generation" not in candidate.settings or not isinstance(rows, int):
        return
    completions = count_of(candidate.settings, "num_generations")
    needed = generation_batch(candidate, task) // completions
    if rows < needed:
        yield (
            f"TOO FEW ROWS: one generation batch takes {needed} prompts, so that TRL would not make"
            " a step."
        )


def generation_batch(candidate: Candidate, task: Task) -> int:
    """Return the completions that are generated together."""
    settings = candidate.settings
    micro = count_of(settings, "per_device_train_batch_size")
    ranks = ranks_of(settings, task.hardware.count)
    return micro * ranks * count_of(settings, "steps_per_generation")


# 3. Rewards.


def _name_rewards(data: OutputData, task: Task) -> None:
    """Note a missing reward, and name one that has no effect where TRL needs one."""
    user = task.workload.user_settings
    if not user.get("reward_funcs") and not user.get("reward_model_name_or_path"):
        data.keys["reward_funcs"] = [PLACEHOLDER_REWARD]
        data.notes.append(
            "PLACEHOLDER reward_funcs: replace it by your own. Training with this one has no"
            " effect."
        )
