"""Asks the training environment about a dataset's prompts: `inside/prompts.py` does the work there."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import BadInput, TrainingEnvironmentError
from autotune.trainers.base import Job, PromptLengths

_SCRIPT = Path(__file__).resolve().parent.parent / "inside" / "prompts.py"
TIMEOUT_SECONDS = 1800.0


def prompt_lengths(job: Job, dataset: Mapping[str, object] | None, limit: int | None) -> PromptLengths | None:
    """The dataset's lengths; None where there is no dataset, or it can't be read here."""
    if dataset is None:
        return None
    try:
        found = measure_prompts(job, dataset, limit=limit, out=None)
    except BadInput:
        return None
    percentiles = found["percentiles"]
    assert isinstance(percentiles, dict)
    return PromptLengths(
        rows=int(str(found["rows"])),
        kept=int(str(found["kept"])),
        percentiles={int(share): int(length) for share, length in percentiles.items()},
    )


def measure_prompts(
    job: Job, dataset: Mapping[str, object], *, limit: int | None, out: Path | None, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, object]:
    """How long the prompts are, and, with `out`, the dataset without those beyond `limit` (see inside/prompts.py)."""
    model, user = job.workload.model, job.workload.user_settings
    request = {
        "model": str(model.folder or model.name),
        "dataset": dict(dataset),
        "limit": limit,
        "out": None if out is None else str(out),
        "trust_remote_code": job.workload.trust_remote_code,
        "model_revision": job.workload.held.get("model_revision"),
        "chat_template_kwargs": user.get("chat_template_kwargs"),
    }
    try:
        done = subprocess.run(
            [str(job.workload.python), str(_SCRIPT)],
            input=json.dumps(request), capture_output=True, text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except OSError as error:
        raise TrainingEnvironmentError(f"{job.workload.python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(
            f"Measuring the prompts of {_name(dataset)} took more than {timeout_seconds:.0f} s.", way_out="Use a smaller dataset."
        ) from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise BadInput(
            f"The prompts of {_name(dataset)} could not be measured with the tokenizer of {request['model']}: {last[0]}.",
            way_out="Both must be readable in the training environment.",
        )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


_filtered: dict[str, tuple[dict[str, object], tempfile.TemporaryDirectory[str]]] = {}


def filter_prompts(job: Job, dataset: Mapping[str, object], *, limit: int, out: Path) -> dict[str, object]:
    """The dataset without longer prompts, in the folder `out`. Tokenised once per process and limit: recommendations are written
    again whenever a better one is found."""
    model, place = job.workload.model, Path(str(dataset.get("dataset_name")))
    files = sorted((str(file), file.stat().st_mtime_ns) for file in place.rglob("*")) if place.is_dir() else []
    key = json.dumps([str(job.workload.python), str(model.folder or model.name), dict(dataset), files, limit], default=str)
    if key not in _filtered:
        kept = tempfile.TemporaryDirectory(prefix="autotune-dataset-")
        _filtered[key] = measure_prompts(job, dataset, limit=limit, out=Path(kept.name)), kept
    found, kept = _filtered[key]
    shutil.copytree(kept.name, out, dirs_exist_ok=True)
    return {**found, "dataset_name": str(out)}


def _name(dataset: Mapping[str, object]) -> str:
    return repr(dataset.get("dataset_name") or "the datasets of the configuration")
