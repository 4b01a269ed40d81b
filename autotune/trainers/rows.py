"""Asks the training environment how long a dataset's rows are: `inside/rows.py` does the work there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autotune.errors import BadInput, TrainingEnvironmentError
from autotune.trainers.base import Job, RowLengths

_SCRIPT = Path(__file__).resolve().parent.parent / "inside" / "rows.py"
TIMEOUT_SECONDS = 300.0


def row_lengths(job: Job, dataset: Mapping[str, object] | None) -> RowLengths | None:
    """None where there is no dataset; BadInput where it can't be measured."""
    if dataset is None or not dataset.get("dataset_name"):
        return None
    model, workload = job.workload.model, job.workload
    request = {
        "model": str(model.folder or model.name),
        "dataset": dict(dataset),
        "trust_remote_code": workload.trust_remote_code,
        "model_revision": workload.held.get("model_revision"),
        "chat_template_kwargs": workload.user_settings.get("chat_template_kwargs"),
    }
    try:
        done = subprocess.run(
            [str(workload.python), str(_SCRIPT)],
            input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except OSError as error:
        raise TrainingEnvironmentError(f"{workload.python} cannot be started: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise _unmeasured(dataset, f"it took more than {TIMEOUT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise _unmeasured(dataset, last[0])
    return msgspec.json.decode(done.stdout, type=RowLengths)


def _unmeasured(dataset: Mapping[str, object], why: str) -> BadInput:
    return BadInput(
        f"the rows of {dataset['dataset_name']} were not measured: {why}",
        way_out="The dataset and the model's tokenizer must be readable in the training environment.",
    )
