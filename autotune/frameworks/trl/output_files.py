"""Winner in TRL's own files: recommended.yaml, accelerate.yaml, launch.sh, and the filtered
dataset.

`trl grpo --config recommended.yaml` reads the YAML in the launching process, as one rank, and again
in each rank. The file is valid for both. launch.sh starts the ranks without that process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from autotune.core.files import FOR_EVERYBODY, TO_BE_RUN, comments, write_atomically
from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks.base import count_of
from autotune.frameworks.trl.field_list import fields
from autotune.frameworks.trl.launch_files import launch_configuration, launch_script
from autotune.frameworks.trl.output_data import (
    DATASET_SETTINGS,
    generates,
    generation_batch,
    prepare_data,
)
from autotune.frameworks.trl.precision import loaded_dtype
from autotune.frameworks.trl.settings import GENERATION_SHAPE, OWN_SETTINGS, nested, ranks_of
from autotune.frameworks.trl.user_config import REPLACED

YAML_NAME = "recommended.yaml"
ACCELERATE_NAME = "accelerate.yaml"
LAUNCH_NAME = "launch.sh"
PROGRAM_NAME = "train.py"

SHIM_NAME = "vllm_on_cpu"
SHIM = Path(__file__).resolve().parents[2] / "worker" / "vllm_on_cpu.py"


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
    # 1. Dataset.
    data = prepare_data(candidate, task, folder.resolve(), home, dataset)
    # 2. recommended.yaml.
    content = {**_settings(candidate, task), **data.keys}
    if not script:
        content["config_file"] = str(home / ACCELERATE_NAME)  # a key of TRL's command
    notes = [*_head(candidate, task, script=script), *data.notes]
    write(folder / YAML_NAME, comments(notes) + _as_yaml(content))
    # 3. accelerate.yaml and launch.sh.
    write_launch_configuration(folder, candidate, task)
    shim = write_shim(folder, candidate, task)
    launch = launch_script(
        candidate,
        task,
        name=LAUNCH_NAME,
        files=(YAML_NAME, ACCELERATE_NAME),
        model=_model(task),
        dataset=data.own_dataset,
        shim=SHIM_NAME if shim else None,
        program=PROGRAM_NAME if script else None,
    )
    write(folder / LAUNCH_NAME, launch, executable=True)
    # 4. Training script.
    names = [YAML_NAME, ACCELERATE_NAME, LAUNCH_NAME]
    if script:
        write(folder / PROGRAM_NAME, training_script(task.workload.method))
        names.append(PROGRAM_NAME)
    return [*data.paths, *shim, *(folder / name for name in names)]


def _as_yaml(content: Mapping[str, object]) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if len(text.splitlines()) != text.count("\n"):
        # The emitter leaves line breaks of Unicode in plain scalars, where a reader takes them for
        # spaces.
        text = yaml.safe_dump(content, sort_keys=False)
    return text


def write_launch_configuration(
    folder: Path,
    candidate: Candidate,
    task: Task,
) -> Path:
    """Write the file for `accelerate launch --config_file`."""
    content = launch_configuration(candidate, task)
    text = yaml.safe_dump(content, sort_keys=False)
    return write(folder / ACCELERATE_NAME, text)


def write_shim(
    folder: Path,
    candidate: Candidate,
    task: Task,
) -> list[Path]:
    """Write the patch that makes vLLM on a CPU keep weights in a form that TRL can update; nothing
    without vLLM on a CPU.
    """
    if task.hardware.kind != "cpu" or not candidate.settings.get("use_vllm"):
        return []
    path = folder / SHIM_NAME / "sitecustomize.py"
    path.parent.mkdir(exist_ok=True)
    return [write(path, SHIM.read_text(encoding="utf-8"))]


def training_script(method: str) -> str:
    """Return the script of a method without a TRL command. It reads the YAML as `trl grpo` does."""
    scripts = Path(__file__).parent / "scripts"
    text = (scripts / f"{method}.txt").read_text(encoding="utf-8")
    for part in ("rows", "loading"):
        lines = (scripts / f"{part}.txt").read_text(encoding="utf-8")
        text = text.replace(f"@{part.upper()}@\n", lines)
    return text


def write(
    path: Path,
    text: str,
    *,
    executable: bool = False,
) -> Path:
    mode = TO_BE_RUN if executable else FOR_EVERYBODY
    write_atomically(path, text.encode(), mode=mode)
    return path


# Content of recommended.yaml.


def _head(
    candidate: Candidate,
    task: Task,
    *,
    script: bool,
) -> list[str]:
    """Return the comments at its head."""
    basis = task.hardware.basis
    method = task.workload.method
    prompt = count_of(candidate.settings, "max_prompt_length")
    completion = count_of(candidate.settings, "max_completion_length")
    lengths = f"rows of up to {prompt + completion} tokens"
    if generates(candidate):
        lengths = f"prompts of up to {prompt} tokens and completions of up to {completion}"
    run = f"{method.upper()} for {task.workload.model.name} on {task.hardware}"
    head = [
        f"{run}, {basis} by autotune. Start it with ./{LAUNCH_NAME}",
        f"{basis.capitalize()} with {lengths}.",
    ]
    if task.hardware.kind == "cuda" and not script:
        head.append(
            f"`trl {method} --config` needs more on the first GPU: the CUDA context of its own"
            " process."
        )
    return head


def with_changes(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the user's file with this candidate's settings, and unchanged data and launch
    options.
    """
    settings = _settings(candidate, task)
    for name, value in task.workload.user_settings.items():
        if name in DATASET_SETTINGS | REPLACED:
            settings[name] = value
    return settings


def _settings(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the user's file with the tuned settings, and other settings that differ from TRL's
    defaults.
    """
    user = _user_settings(task)
    tuned = _tuned_settings(candidate, task)
    if "dtype" in user:
        dtype = loaded_dtype(user["dtype"], task.workload.model.config)
        if dtype == tuned.get("dtype"):
            tuned["dtype"] = user["dtype"]  # `auto` stays: it names this checkpoint's precision
    return {
        "model_name_or_path": _model(task),
        **user,
        **tuned,
        **nested(candidate.settings, user),
        **_generation_shape(candidate, task),
        "output_dir": user.get("output_dir", "./outputs"),
    }


def _user_settings(task: Task) -> dict[str, object]:
    """Return what the user states, without data and launch options."""
    workload = task.workload
    written_elsewhere = REPLACED | OWN_SETTINGS | DATASET_SETTINGS
    settings: dict[str, object] = {}
    stated = {**workload.held_values, **workload.user_settings}
    for name, value in stated.items():
        if name in written_elsewhere or name in GENERATION_SHAPE or name in workload.defaults:
            continue
        settings[name] = value
    return settings


def _tuned_settings(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the candidate's knobs, and its settings that differ from TRL's defaults."""
    accepted = fields(task.workload.method)
    settings: dict[str, object] = {}
    for name, value in candidate.settings.items():
        if name not in accepted or name in GENERATION_SHAPE:
            continue
        if name in candidate.knobs or value != accepted[name].default:
            settings[name] = value
    return settings


def _generation_shape(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the generation batch on several ranks, else the steps.

    The launching process reads the file as one rank, and refuses incomplete groups there.
    """
    if "steps_per_generation" not in candidate.settings:
        return {}
    if ranks_of(candidate.settings, task.hardware.count) == 1:
        return {"steps_per_generation": candidate.settings["steps_per_generation"]}
    return {"generation_batch_size": generation_batch(candidate, task)}


def _model(task: Task) -> str:
    """Return the model as the user names it, else its local folder or its name on the hub."""
    stated = task.workload.user_settings.get("model_name_or_path")
    if isinstance(stated, str):
        return stated
    model = task.workload.model
    if model.folder is not None and Path(model.name).exists():
        return str(model.folder.resolve())
    return model.name
