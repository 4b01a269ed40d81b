"""Artifacts of a trial, derived from its records on request: settings, log, failure, memory over time."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import yaml
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import FrozenTrial

from autotune.core.answer import Trial, plain
from autotune.search import trial_records
from autotune.search.dashboard.guard import READ_ONLY

_PREFIX = "artifacts:"
_NAMESPACE = uuid.UUID("6f1c35f4-0c6a-4cf0-9d3e-6a6f1b0e7a11")


def _settings(trial: FrozenTrial) -> bytes | None:
    candidate = trial.user_attrs.get(trial_records.CANDIDATE)
    settings = candidate.get("settings") if isinstance(candidate, dict) else None
    return yaml.safe_dump(dict(settings), sort_keys=False).encode() if settings else None


def _failure(trial: Trial) -> str | None:
    failure = trial.measurement.failure
    return None if failure is None else failure.excerpt or failure.evidence


def _timeline(trial: Trial) -> str | None:
    """Memory over time as CSV."""
    timeline = trial.measurement.memory.timeline
    rows = (f"{moment.seconds},{moment.peak_bytes},{moment.phase or ''}" for moment in timeline)
    return "\n".join(["seconds,peak_bytes,phase", *rows, ""]) if timeline else None


def _of_measurement(make: Callable[[Trial], str | None]) -> Callable[[FrozenTrial], bytes | None]:
    def made(trial: FrozenTrial) -> bytes | None:
        measured = trial_records.read_trial(trial)
        text = make(measured) if measured else None
        return None if text is None else text.encode()

    return made


KINDS: dict[str, tuple[str, Callable[[FrozenTrial], bytes | None]]] = {
    "settings.yaml": ("text/plain", _settings),
    "output.log": ("text/plain", _of_measurement(lambda trial: trial.measurement.printed or None)),
    "failure.log": ("text/plain", _of_measurement(_failure)),
    "memory.json": ("application/json", _of_measurement(lambda trial: json.dumps(plain(trial.measurement.memory), indent=1))),
    "memory.csv": ("text/csv", _of_measurement(_timeline)),
}
"""File name -> MIME type and function that derives the content."""


def _id(trial: FrozenTrial, name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{trial._trial_id}/{name}"))


def of_trial(trial: FrozenTrial) -> dict[str, Any]:
    """Return the attributes that list a trial's artifacts for the dashboard."""
    return {
        f"{_PREFIX}{_id(trial, name)}": json.dumps(
            {"artifact_id": _id(trial, name), "mimetype": kind, "encoding": None, "filename": f"trial-{trial.number}-{name}"}
        )
        for name, (kind, make) in KINDS.items()
        if make(trial) is not None
    }


class RecordedArtifacts:
    """Artifact store without files."""

    def __init__(self, trials: Callable[[], Sequence[FrozenTrial]]) -> None:
        self._trials = trials

    def open_reader(self, artifact_id: str) -> BinaryIO:
        for trial in self._trials():
            for name, (_, make) in KINDS.items():
                if _id(trial, name) == artifact_id and (content := make(trial)) is not None:
                    return io.BytesIO(content)
        raise ArtifactNotFound(f"No trial of this study has an artifact {artifact_id}.")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(READ_ONLY)

    write = remove = _refuse
