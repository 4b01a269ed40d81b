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

PROMPTS_TIMEOUT_S, ROWS_TIMEOUT_S = 1800.0, 300.0
Measured = TypeVar("Measured", RowLengths, ImageRows)


def measure_rows(task: Task, dataset: Mapping[str, object], kind: type[Measured]) -> Measured:
    """Measure the lengths of the rows, or read the sizes of their images. Raises BadInput for an
    unreadable dataset.
    """
    return msgspec.json.decode(
        _measure("row" if kind is RowLengths else "image", task, dataset), type=kind
    )


def prompt_lengths(task: Task, dataset: Mapping[str, object], limit: int | None) -> PromptLengths:
    """Measure the prompts, once per process and state of the files. Raises BadInput for an
    unreadable dataset.
    """
    key = _state(task, dataset, limit)
    if key not in _measured:
        _measured[key] = msgspec.convert(
            measure_prompts(task, dataset, limit=limit, out=None), PromptLengths, strict=False
        )
    return _measured[key]


def measure_prompts(
    task: Task, dataset: Mapping[str, object], *, limit: int | None, out: Path | None
) -> dict[str, object]:
    """Measure the prompts. With `out`, also write the dataset without prompts longer than
    `limit`.
    """
    extra = {"limit": limit, "out": None if out is None else str(out)}
    answer: dict[str, object] = json.loads(
        _measure("prompt", task, dataset, extra, PROMPTS_TIMEOUT_S)
    )
    return answer


def _measure(
    unit: str,
    task: Task,
    dataset: Mapping[str, object],
    extra: Mapping[str, object] | None = None,
    timeout_seconds: float = ROWS_TIMEOUT_S,
) -> str:
    workload, worker = task.workload, Path(__file__).resolve().parent.parent / "worker"
    name = repr(dataset.get("dataset_name") or "the datasets of the configuration")
    request = {
        "model": model_path(task),
        "dataset": dict(dataset),
        "trust_remote_code": workload.trust_remote_code,
        "model_revision": workload.held.get("model_revision"),
        "chat_template_kwargs": workload.user_settings.get("chat_template_kwargs"),
        **(extra or {}),
    }
    try:
        done = subprocess.run(
            [str(workload.python), str(worker), f"{unit}s"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except OSError as error:
        raise TrainingEnvironmentError(f"{workload.python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"Measuring the {unit}s of {name} took more than {timeout_seconds:.0f} s.",
            way_out="Use a smaller dataset.",
        ) from error
    if done.returncode != 0:
        (reason,) = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise BadInput(
            f"The {unit}s of {name} could not be measured with the tokenizer of {request['model']}:"
            f" {reason}.",
            way_out="Both must be readable in the training environment.",
        )
    return done.stdout


_measured: dict[str, PromptLengths] = {}
_filtered: dict[str, tuple[dict[str, object], tempfile.TemporaryDirectory[str]]] = {}


def filter_prompts(
    task: Task, dataset: Mapping[str, object], *, limit: int, out: Path
) -> dict[str, object]:
    """Write the dataset without longer prompts into `out`; cached, since every better
    recommendation is written anew.
    """
    key = _state(task, dataset, limit)
    if key not in _filtered:
        cached = tempfile.TemporaryDirectory(prefix="autotune-dataset-")
        _filtered[key] = measure_prompts(task, dataset, limit=limit, out=Path(cached.name)), cached
    found, cached = _filtered[key]
    shutil.copytree(cached.name, out, dirs_exist_ok=True)
    return {**found, "dataset_name": str(out)}


def _state(task: Task, dataset: Mapping[str, object], limit: int | None) -> str:
    """Return the key of a measurement: the interpreter, the tokenizer, the dataset and its
    files.
    """
    place = Path(str(dataset.get("dataset_name")))
    places = sorted(place.rglob("*")) if place.is_dir() else [place] if place.is_file() else []
    files = [(str(file), file.stat().st_mtime_ns) for file in places]
    template = task.workload.user_settings.get("chat_template_kwargs")
    return json.dumps(
        [str(task.workload.python), model_path(task), dict(dataset), files, template, limit],
        default=str,
    )
