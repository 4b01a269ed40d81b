"""Lengths of a dataset's prompts and rows, measured by a script in the training environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from autotune.core.dataset import ImageRows, PromptLengths, RowLengths
from autotune.core.errors import BadInput, TrainingEnvironmentError
from autotune.core.job import Task
from autotune.frameworks.base import model_path

PROMPTS_TIMEOUT_S = 1800.0
ROWS_TIMEOUT_S = 300.0
WORKER = Path(__file__).resolve().parent.parent / "worker"
Measured = TypeVar("Measured", RowLengths, ImageRows)

Dataset = Mapping[str, object]
"""Settings that name a dataset, as TRL has them."""

MeasuredSizes = dict[str, object]
"""Prompt lengths, and the dataset that was written, as JSON."""

_measured: dict[str, PromptLengths] = {}
_filtered: dict[str, tuple[MeasuredSizes, tempfile.TemporaryDirectory[str]]] = {}


def measure_rows(
    task: Task,
    dataset: Dataset,
    kind: type[Measured],
) -> Measured:
    """Measure the lengths of the rows, or read the sizes of their images. Raises BadInput for an
    unreadable dataset.
    """
    unit = "row" if kind is RowLengths else "image"
    return msgspec.json.decode(_measure(unit, task, dataset), type=kind)


def prompt_lengths(
    task: Task,
    dataset: Dataset,
    limit: int | None,
) -> PromptLengths:
    """Measure the prompts, once per process and state of the files. Raises BadInput for an
    unreadable dataset.
    """
    key = _state(task, dataset, limit)
    if key not in _measured:
        answer = measure_prompts(task, dataset, limit=limit, out=None)
        _measured[key] = msgspec.convert(answer, PromptLengths, strict=False)
    return _measured[key]


def filter_prompts(
    task: Task,
    dataset: Dataset,
    *,
    limit: int,
    out: Path,
) -> MeasuredSizes:
    """Write the dataset without longer prompts into `out`; cached, since every better
    recommendation is written anew.
    """
    key = _state(task, dataset, limit)
    if key not in _filtered:
        cache = tempfile.TemporaryDirectory(prefix="autotune-dataset-")
        answer = measure_prompts(task, dataset, limit=limit, out=Path(cache.name))
        _filtered[key] = answer, cache
    answer, cache = _filtered[key]
    shutil.copytree(cache.name, out, dirs_exist_ok=True)
    return {**answer, "dataset_name": str(out)}


def measure_prompts(
    task: Task,
    dataset: Dataset,
    *,
    limit: int | None,
    out: Path | None,
) -> MeasuredSizes:
    """Measure the prompts. With `out`, also write the dataset without prompts longer than
    `limit`.
    """
    parameters = {"limit": limit, "out": None if out is None else str(out)}
    answer: MeasuredSizes = json.loads(
        _measure("prompt", task, dataset, parameters, PROMPTS_TIMEOUT_S)
    )
    return answer


def _measure(
    unit: str,
    task: Task,
    dataset: Dataset,
    parameters: Mapping[str, object] | None = None,
    timeout_seconds: float = ROWS_TIMEOUT_S,
) -> str:
    """Return the answer of the worker's script as JSON; `unit`: prompt, row or image."""
    request = {**_dataset_request(task, dataset), **(parameters or {})}
    dataset_name = repr(dataset.get("dataset_name") or "the datasets of the configuration")
    python = task.workload.python
    try:
        result = _run_worker(python, f"{unit}s", request, timeout_seconds)
    except OSError as error:
        raise TrainingEnvironmentError(f"{python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"Measuring the {unit}s of {dataset_name} took more than {timeout_seconds:.0f} s.",
            way_out="Use a smaller dataset.",
        ) from error
    if result.returncode != 0:
        error_lines = result.stderr.strip().splitlines() or ["no reason was given"]
        raise BadInput(
            f"The {unit}s of {dataset_name} could not be measured with the tokenizer of"
            f" {request['model']}: {error_lines[-1]}.",
            way_out="Both must be readable in the training environment.",
        )
    return result.stdout


def _dataset_request(task: Task, dataset: Dataset) -> dict[str, object]:
    """Return the dataset with the tokenizer of its texts, as the worker's script takes both."""
    workload = task.workload
    return {
        "model": model_path(task),
        "dataset": dict(dataset),
        "trust_remote_code": workload.trust_remote_code,
        "model_revision": workload.held_values.get("model_revision"),
        "chat_template_kwargs": workload.user_settings.get("chat_template_kwargs"),
    }


def _run_worker(
    python: Path,
    command: str,
    request: Mapping[str, object],
    timeout_seconds: float,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), str(WORKER), command],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def _state(
    task: Task,
    dataset: Dataset,
    limit: int | None,
) -> str:
    """Return the key of a measurement: the interpreter, the tokenizer, the dataset and its
    files.
    """
    path = Path(str(dataset.get("dataset_name")))
    paths = []
    if path.is_dir():
        paths = sorted(path.rglob("*"))
    elif path.is_file():
        paths = [path]
    files = [(str(file), file.stat().st_mtime_ns) for file in paths]
    template = task.workload.user_settings.get("chat_template_kwargs")
    key = [str(task.workload.python), model_path(task), dict(dataset), files, template, limit]
    return json.dumps(key, default=str)
