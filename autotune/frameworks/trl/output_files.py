"""Winner in TRL's own files: recommended.yaml, accelerate.yaml, launch.sh, and the filtered
dataset.

`trl grpo --config recommended.yaml` reads the YAML in the launching process, as one rank, and again
in each rank. The file is valid for both. launch.sh starts the ranks without that process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from autotune.core.errors import BadInput
from autotune.core.files import FOR_EVERYBODY, TO_BE_RUN, comments, write_atomically
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.core.yaml_document import read_document
from autotune.frameworks.base import count_of
from autotune.frameworks.dataset_measurement import filter_prompts
from autotune.frameworks.trl.field_list import fields, installed_defaults
from autotune.frameworks.trl.launch_files import launch_configuration, launch_script
from autotune.frameworks.trl.settings import (
    GENERATION_SHAPE,
    OWN_SETTINGS,
    loaded_dtype,
    nested,
    ranks_of,
)
from autotune.frameworks.trl.user_config import REPLACED, comparable

YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME, PROGRAM_NAME = (
    "recommended.yaml",
    "accelerate.yaml",
    "launch.sh",
    "train.py",
)
DATASET_NAME, PROMPTS_NAME, PLACEHOLDER_NAME = "dataset", "prompts.json", "placeholder"

PLACEHOLDER_REWARD = (  # reward of TRL that is 0 below 1024 tokens, so that training has no effect
    "get_soft_overlong_punishment"
)
SHIM_NAME = "vllm_on_cpu"
SHIM = Path(__file__).resolve().parents[2] / "worker" / "vllm_on_cpu.py"

_ROWS: Mapping[str, tuple[str, ...]] = {
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


def write_files(
    candidate: Candidate,
    task: Task,
    folder: Path,
    dataset: Mapping[str, object] | None,
    *,
    script: bool = False,
    destination: Path | None = None,
) -> list[Path]:
    """Write the files of the final run, each atomically. They name paths below `destination`, to
    which the folder is moved.

    `script` writes a training script for a method without a TRL command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = (destination or folder).resolve()
    data = _prepare_data(candidate, task, folder.resolve(), home, dataset)
    launcher = (
        {} if script else {"config_file": str(home / ACCELERATE_NAME)}
    )  # a key of TRL's command
    content = {**_settings(candidate, task), **data.keys, **launcher}
    notes = [*_head(candidate, task, script=script), *data.notes]
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if len(text.splitlines()) != text.count("\n"):
        # The emitter leaves line breaks of Unicode in plain scalars, where a reader takes them for
        # spaces.
        text = yaml.safe_dump(content, sort_keys=False)
    text = comments(notes) + text
    write(folder / YAML_NAME, text)
    write(
        folder / ACCELERATE_NAME,
        yaml.safe_dump(launch_configuration(candidate, task), sort_keys=False),
    )
    shim = (
        write_shim(folder) if task.hardware.kind == "cpu" and candidate.settings["use_vllm"] else []
    )
    started = launch_script(
        candidate,
        task,
        name=LAUNCH_NAME,
        files=(YAML_NAME, ACCELERATE_NAME),
        model=_model(task),
        dataset=data.own_dataset,
        shim=SHIM_NAME if shim else None,
        program=PROGRAM_NAME if script else None,
    )
    write(folder / LAUNCH_NAME, started, executable=True)
    if script:
        write(folder / PROGRAM_NAME, training_script(task.workload.method))
    names = (YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME, *([PROGRAM_NAME] if script else []))
    return [*data.paths, *shim, *(folder / name for name in names)]


def training_script(method: str) -> str:
    """Return the script of a method without a TRL command. It reads the YAML as `trl grpo` does."""
    scripts = Path(__file__).parent / "scripts"
    text = (scripts / f"{method}.txt").read_text(encoding="utf-8")
    for part in ("rows", "loading"):
        text = text.replace(
            f"@{part.upper()}@\n", (scripts / f"{part}.txt").read_text(encoding="utf-8")
        )
    return text


@dataclass
class _Data:
    """Keys of the YAML for data and rewards, and the files that they name."""

    keys: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    own_dataset: str | None = None


def _prepare_data(
    candidate: Candidate, task: Task, folder: Path, home: Path, dataset: Mapping[str, object] | None
) -> _Data:
    """Write the data into `folder`, and name it below `home`."""
    data = _Data()
    user = task.workload.user_settings
    if dataset is None:  # a few rows, since TRL refuses a file without a dataset
        columns = _ROWS.get(task.workload.method, ("prompt",))
        marks = {"label": True} if task.workload.method == "kto" else {}
        rows = (
            {name: f"What is {a} plus {b}? ({name})" for name in columns} | marks
            for a in range(32)
            for b in range(32)
        )
        path = folder / PLACEHOLDER_NAME / "train.jsonl"
        path.parent.mkdir(exist_ok=True)
        data.paths.append(write(path, "".join(json.dumps(row) + "\n" for row in rows)))
        data.keys["dataset_name"], data.own_dataset = str(home / PLACEHOLDER_NAME), PLACEHOLDER_NAME
        unit = "prompt" if columns == ("prompt",) else "row"
        data.notes.append(
            f"PLACEHOLDER dataset_name: replace it by your own, with no {unit} longer than the"
            " limit above."
        )
    elif not _generates(candidate):
        data.keys.update(dataset)
        if candidate.settings.get("max_length", 0) is None:
            data.notes.append(
                "NOT TRUNCATED: without padding the trainer truncates no rows. Remove longer rows"
                " from the dataset yourself."
            )
    else:
        _filter(data, candidate, task, folder, home, dataset)
    if not _generates(candidate):
        return data
    if not user.get("reward_funcs") and not user.get("reward_model_name_or_path"):
        data.keys["reward_funcs"] = [PLACEHOLDER_REWARD]
        data.notes.append(
            "PLACEHOLDER reward_funcs: replace it by your own. Training with this one has no"
            " effect."
        )
    return data


def _generates(candidate: Candidate) -> bool:
    """Return True if the method generates completions to prompts; others train on whole rows."""
    return "num_generations" in candidate.settings


def _filter(
    data: _Data,
    candidate: Candidate,
    task: Task,
    folder: Path,
    home: Path,
    dataset: Mapping[str, object],
) -> None:
    limit = candidate.settings["max_prompt_length"]
    assert isinstance(limit, int)
    try:
        found = filter_prompts(task, dataset, limit=limit, out=folder / DATASET_NAME)
    except BadInput as error:
        # An unreadable dataset must not discard the result of a search: the file names what is
        # missing.
        found = {"error": str(error), "limit": limit}
        data.keys.update(dataset)
        data.notes.append(f"NOT FILTERED: keep prompts within {limit} tokens yourself. {error}")
    else:
        found["dataset_name"] = data.keys["dataset_name"] = str(home / DATASET_NAME)
        data.keys.update(
            {
                name: dataset[name]
                for name in ("dataset_train_split", "dataset_test_split")
                if name in dataset
            }
        )
        data.own_dataset = DATASET_NAME
        data.paths += sorted((folder / DATASET_NAME).rglob("*.parquet"))
        data.notes.append(
            f"The dataset contains the {found['kept']} of {found['rows']} rows with prompts of at"
            f" most {limit} tokens."
        )
        kept = found["kept"]
        if "steps_per_generation" in candidate.settings and isinstance(kept, int):
            needed = _generation_batch(candidate, task) // count_of(
                candidate.settings, "num_generations"
            )
            if kept < needed:
                data.notes.append(
                    f"TOO FEW ROWS: one generation batch takes {needed} prompts, so that TRL would"
                    " not make a step."
                )
    data.paths.append(write(folder / PROMPTS_NAME, json.dumps(found, indent=2) + "\n"))


def _generation_batch(candidate: Candidate, task: Task) -> int:
    settings = candidate.settings
    micro, steps = (
        count_of(settings, "per_device_train_batch_size"),
        count_of(settings, "steps_per_generation"),
    )
    return micro * ranks_of(settings, task.hardware.count) * steps


def _head(candidate: Candidate, task: Task, *, script: bool) -> list[str]:
    prompt, completion = (
        count_of(candidate.settings, f"max_{part}_length") for part in ("prompt", "completion")
    )
    basis, method = task.hardware.basis, task.workload.method.upper()
    lengths = f"prompts of up to {prompt} tokens and completions of up to {completion}"
    if not _generates(candidate):
        lengths = f"rows of up to {prompt + completion} tokens"
    head = [
        (
            f"{method} for {task.workload.model.name} on {task.hardware}, {basis} by autotune."
            f" Start it with ./{LAUNCH_NAME}"
        ),
        f"{basis.capitalize()} with {lengths}.",
    ]
    if task.hardware.kind == "cuda" and not script:
        head.append(
            f"`trl {task.workload.method} --config` needs more on the first GPU: the CUDA context"
            " of its own process."
        )
    return head


def _settings(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the user's file with the tuned settings, and other settings that differ from TRL's
    defaults.
    """
    method, workload = task.workload.method, task.workload
    user = {
        name: value
        for name, value in {**workload.held, **workload.user_settings}.items()
        if name not in REPLACED | OWN_SETTINGS | DATASET_SETTINGS
        and name not in GENERATION_SHAPE
        and name not in workload.defaults
    }
    tuned: dict[str, object] = {
        name: value
        for name, value in candidate.settings.items()
        if name in fields(method)
        and name not in GENERATION_SHAPE
        and (name in candidate.knobs or value != fields(method)[name].default)
    }
    if "dtype" in user and loaded_dtype(user["dtype"], workload.model.config) == tuned.get("dtype"):
        tuned["dtype"] = user["dtype"]  # `auto` stays: it names this checkpoint's precision
    return {
        "model_name_or_path": _model(task),
        **user,
        **tuned,
        **nested(candidate.settings, user),
        **_generation_shape(candidate, task),
        "output_dir": user.get("output_dir", "./outputs"),
    }


def with_changes(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the user's file with this candidate's settings, and unchanged data and launch
    options.
    """
    kept = {
        name: value
        for name, value in task.workload.user_settings.items()
        if name in DATASET_SETTINGS | REPLACED
    }
    return {**_settings(candidate, task), **kept}


def _generation_shape(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the generation batch on several ranks, else the steps.

    The launching process reads the file as one rank, and refuses incomplete groups there."""
    if "steps_per_generation" not in candidate.settings:
        return {}
    if ranks_of(candidate.settings, task.hardware.count) == 1:
        return {"steps_per_generation": candidate.settings["steps_per_generation"]}
    return {"generation_batch_size": _generation_batch(candidate, task)}


def _model(task: Task) -> str:
    named = task.workload.user_settings.get("model_name_or_path")
    if isinstance(named, str):
        return named
    model = task.workload.model
    return (
        str(model.folder.resolve())
        if model.folder is not None and Path(model.name).exists()
        else model.name
    )


def write_shim(folder: Path) -> list[Path]:
    """Write the patch that makes vLLM on a CPU keep weights in a form that TRL can update."""
    path = folder / SHIM_NAME / "sitecustomize.py"
    path.parent.mkdir(exist_ok=True)
    return [write(path, SHIM.read_text(encoding="utf-8"))]


def write(path: Path, text: str, *, executable: bool = False) -> Path:
    write_atomically(path, text.encode(), mode=TO_BE_RUN if executable else FOR_EVERYBODY)
    return path


@dataclass(frozen=True, kw_only=True)
class WrittenSetting:
    """One difference between the user's file and the written one."""

    name: str
    yours: object  # stated or TRL's default
    written: object
    kind: Literal["changed", "assumed", "moved"]
    """`changed`: trains otherwise; `assumed`: written out with the value that holds anyway;
    `moved`: now in accelerate.yaml.
    """


def written_settings(task: Task, path: Path) -> list[WrittenSetting]:
    """Compare the written file with the user's; all values are those that TRL's parser yields."""
    stated = task.workload.stated
    if task.workload.config_file is None or task.workload.script is not None or not stated:
        return []
    written = read_document(path).content
    defaults = installed_defaults(task.workload.python, task.workload.method)
    found: list[WrittenSetting] = []
    # 1. Written settings.
    for name, value in written.items():
        yours = stated[name] if name in stated else defaults.get(name)
        same = (name in stated or name in defaults) and comparable(yours) == comparable(value)
        if not (same and name in stated):
            found.append(
                WrittenSetting(
                    name=str(name),
                    yours=yours,
                    written=value,
                    kind="assumed" if same else "changed",
                )
            )
    # 2. Those that were left out.
    for name in (name for name in stated if name not in written and name not in OWN_SETTINGS):
        if name in REPLACED:
            found.append(
                WrittenSetting(name=name, yours=stated[name], written=ACCELERATE_NAME, kind="moved")
            )
        else:
            found.append(
                WrittenSetting(
                    name=name, yours=stated[name], written=defaults.get(name), kind="changed"
                )
            )
    return found
