"""The winner in TRL's own files: recommended.yaml, accelerate.yaml, launch.sh, and the filtered dataset.

`trl grpo --config recommended.yaml` reads the YAML twice: once in the launching process, alone, and once
in each rank. What is written is accepted by both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from autotune.candidate import Candidate
from autotune.errors import BadInput
from autotune.files import FOR_EVERYBODY, TO_BE_RUN, put_whole
from autotune.trainers.base import Job
from autotune.trainers.trl_config import REPLACED
from autotune.trainers.trl_fields import fields
from autotune.trainers.trl_launch import launch_configuration
from autotune.trainers.trl_prompts import filter_prompts
from autotune.trainers.trl_script import script
from autotune.trainers.trl_settings import GENERATION_SHAPE, OWN_SETTINGS
from autotune.trainers.trl_topology import nested, ranks_of

YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME, PROGRAM_NAME = "recommended.yaml", "accelerate.yaml", "launch.sh", "train.py"
DATASET_NAME, PROMPTS_NAME, PLACEHOLDER_NAME = "dataset", "prompts.json", "placeholder"

PLACEHOLDER_REWARD = "get_soft_overlong_punishment"
"""A reward of TRL's own that is 0 for completions below 1024 tokens: with it nothing is learned."""

SHIM_NAME = "vllm_on_cpu"
SHIM = Path(__file__).resolve().parent.parent / "inside" / "vllm_on_cpu.py"

DATASET_SETTINGS = frozenset({"datasets", "dataset_name", "dataset_config", "dataset_streaming", "streaming", "test_split_size"})


def write_files(
    candidate: Candidate, job: Job, folder: Path, dataset: Mapping[str, object] | None, *, program: str | None = None
) -> list[Path]:
    """Everything that the final run needs. Each file is whole or absent. `program` trains where TRL has no command that does."""
    folder.mkdir(parents=True, exist_ok=True)
    data = _prepare_data(candidate, job, folder.resolve(), dataset)
    launcher = {} if program else {"config_file": str(folder.resolve() / ACCELERATE_NAME)}  # a key of the command alone
    content = {**_settings(candidate, job), **data.keys, **launcher}
    notes = [*_head(candidate, job), *data.notes]
    text = "".join(f"# {line}".rstrip() + "\n" for line in notes) + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    _write(folder / YAML_NAME, text)
    _write(folder / ACCELERATE_NAME, yaml.safe_dump(launch_configuration(candidate, job), sort_keys=False))
    shim = _write_shim(folder) if job.hardware.kind == "cpu" and candidate.settings["use_vllm"] else []
    started = script(
        candidate, job, name=LAUNCH_NAME, files=(YAML_NAME, ACCELERATE_NAME), model=_model(job), dataset=data.own_dataset,
        shim=SHIM_NAME if shim else None, program=PROGRAM_NAME if program else None,
    )  # fmt: skip
    _write(folder / LAUNCH_NAME, started, executable=True)
    if program:
        _write(folder / PROGRAM_NAME, program)
    names = (YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME, *([PROGRAM_NAME] if program else []))
    return [*data.paths, *shim, *(folder / name for name in names)]


class _Data:
    """What the YAML says about data and rewards, and the files behind it."""

    def __init__(self) -> None:
        self.keys: dict[str, object] = {}
        self.notes: list[str] = []
        self.paths: list[Path] = []
        self.own_dataset: str | None = None


def _prepare_data(candidate: Candidate, job: Job, folder: Path, dataset: Mapping[str, object] | None) -> _Data:
    data = _Data()
    user = job.workload.user_settings
    if dataset is None:
        _place_holder(data, folder, job.workload.method)
    elif not _generates(candidate):
        data.keys.update(dataset)
        if candidate.settings.get("max_length", 0) is None:
            data.notes.append(
                "NOT CUT: without padding the trainer cuts no rows, so keep the longer ones out of the dataset yourself."
            )
    else:
        _filter(data, candidate, job, folder, dataset)
    if not _generates(candidate):
        return data
    if "reward_funcs" not in fields(job.workload.method):
        if not user.get("reward_model_path"):
            data.notes.append("NO REWARD: name your reward model with reward_model_path; TRL's default is a stranger's.")
        return data
    if not user.get("reward_funcs") and not user.get("reward_model_name_or_path"):
        data.keys["reward_funcs"] = [PLACEHOLDER_REWARD]
        data.notes.append("PLACEHOLDER reward_funcs: put your own there. With this one nothing is learned.")
    return data


def _generates(candidate: Candidate) -> bool:
    """Whether the method writes its own completions, to prompts; the others train on whole rows."""
    return bool(candidate.settings.keys() & {"num_generations", "response_length"})


_ROWS: Mapping[str, tuple[str, ...]] = {"sft": ("text",), "dpo": ("prompt", "chosen", "rejected")}
"""Columns of the methods' rows, where they are not prompts alone."""


def _place_holder(data: _Data, folder: Path, method: str) -> None:
    """A few rows, so that the file runs as it is: TRL refuses one without a dataset."""
    path = folder / PLACEHOLDER_NAME / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    columns = _ROWS.get(method, ("prompt",))
    rows = ({name: f"What is {a} plus {b}? ({name})" for name in columns} for a in range(32) for b in range(32))
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))
    data.keys["dataset_name"] = str(path.parent)
    data.own_dataset = PLACEHOLDER_NAME
    data.paths.append(path)
    what = "prompt" if columns == ("prompt",) else "row"
    data.notes.append(f"PLACEHOLDER dataset_name: put your own there, with no {what} longer than the limit above.")


def _filter(data: _Data, candidate: Candidate, job: Job, folder: Path, dataset: Mapping[str, object]) -> None:
    limit = candidate.settings["max_prompt_length"]
    assert isinstance(limit, int)
    try:
        found = filter_prompts(job, dataset, limit=limit, out=folder / DATASET_NAME)
    except BadInput as error:
        # After a whole search a dataset out of reach must not cost the answer; the file says what is missing.
        found = {"error": str(error), "limit": limit}
        data.keys.update(dataset)
        data.notes.append(f"NOT FILTERED: keep prompts within {limit} tokens yourself. {error}")
    else:
        data.keys["dataset_name"] = str(folder / DATASET_NAME)
        data.keys.update({name: dataset[name] for name in ("dataset_train_split", "dataset_test_split") if name in dataset})
        data.own_dataset = DATASET_NAME
        data.paths += sorted((folder / DATASET_NAME).rglob("*.parquet"))
        data.notes.append(
            f"The dataset holds the {found['kept']} of {found['rows']} rows with prompts of at most {limit} tokens."
        )
        data.notes += _too_few(candidate, job, found["kept"])
    _write(folder / PROMPTS_NAME, json.dumps(found, indent=2) + "\n")
    data.paths.append(folder / PROMPTS_NAME)


def _too_few(candidate: Candidate, job: Job, kept: object) -> list[str]:
    """TRL draws whole generation batches, so with fewer prompts than one holds it ends without a step."""
    if "steps_per_generation" not in candidate.settings:
        return []
    steps, micro = candidate.settings["steps_per_generation"], candidate.settings["per_device_train_batch_size"]
    generations = candidate.settings["num_generations"]
    assert isinstance(steps, int) and isinstance(micro, int) and isinstance(generations, int) and isinstance(kept, int)
    needed = micro * ranks_of(candidate.settings, job.hardware.count) * steps // generations
    return (
        [f"TOO FEW ROWS: one generation batch takes {needed} prompts, so TRL would not make a single step."]
        if kept < needed
        else []
    )


def _head(candidate: Candidate, job: Job) -> list[str]:
    prompt, completion = candidate.settings["max_prompt_length"], candidate.settings["max_completion_length"]
    how = "measured" if job.hardware.here else "predicted"
    method = job.workload.method.upper()
    lengths = f"prompts of up to {prompt} tokens and completions of up to {completion}"
    if not _generates(candidate):
        assert isinstance(prompt, int) and isinstance(completion, int)
        lengths = f"rows of up to {prompt + completion} tokens"
    return [
        f"{method} for {job.workload.model.name} on {job.hardware}, as autotune {how} it. Start it with ./{LAUNCH_NAME}",
        f"{how.capitalize()} with {lengths}.",
    ]


def _settings(candidate: Candidate, job: Job) -> dict[str, object]:
    """The user's own file with the tuned settings in it; of the rest only what differs from TRL's defaults."""
    method = job.workload.method
    user = {
        name: value
        for name, value in {**job.workload.held, **job.workload.user_settings}.items()
        if name not in REPLACED | OWN_SETTINGS | DATASET_SETTINGS and name not in GENERATION_SHAPE
    }
    tuned = {
        name: value
        for name, value in candidate.settings.items()
        if name in fields(method) and name not in GENERATION_SHAPE and _says_something(name, value, candidate, method)
    }
    return {
        "model_name_or_path": _model(job),
        **user,
        **tuned,
        **nested(candidate.settings, user),
        **_generation_shape(candidate, job),
        "output_dir": user.get("output_dir", "./outputs"),
    }


def with_changes(candidate: Candidate, job: Job) -> dict[str, object]:
    """The user's own file with this candidate's settings, its data and its launch as they were: nothing is filtered."""
    kept = {name: value for name, value in job.workload.user_settings.items() if name in DATASET_SETTINGS | REPLACED}
    return {**_settings(candidate, job), **kept}


def _says_something(name: str, value: object, candidate: Candidate, method: str) -> bool:
    return name in candidate.knobs or value != fields(method)[name].default


def _generation_shape(candidate: Candidate, job: Job) -> dict[str, object]:
    """With several ranks in the other of TRL's two words: the launching process reads the file as one rank, and refuses
    groups that are not whole there."""
    if "steps_per_generation" not in candidate.settings:
        return {}
    steps = candidate.settings["steps_per_generation"]
    ranks = ranks_of(candidate.settings, job.hardware.count)
    if ranks == 1:
        return {"steps_per_generation": steps}
    micro = candidate.settings["per_device_train_batch_size"]
    assert isinstance(steps, int) and isinstance(micro, int)
    return {"generation_batch_size": micro * ranks * steps}


def _model(job: Job) -> str:
    named = job.workload.user_settings.get("model_name_or_path")
    if isinstance(named, str):
        return named
    model = job.workload.model
    return str(model.folder.resolve()) if model.folder is not None and Path(model.name).exists() else model.name


def _write_shim(folder: Path) -> list[Path]:
    """Without it, vLLM on a CPU drops the weights that TRL wants to renew in it."""
    path = folder / SHIM_NAME / "sitecustomize.py"
    path.parent.mkdir(exist_ok=True)
    _write(path, SHIM.read_text(encoding="utf-8"))
    return [path]


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    put_whole(path, text.encode(), mode=TO_BE_RUN if executable else FOR_EVERYBODY)
