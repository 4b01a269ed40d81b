"""Artifacts of a trial, read out of its records when somebody opens one: settings, log, failure, memory over time."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NoReturn

import yaml
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import FrozenTrial

from autotune.recommendation import Trial
from autotune.study import records
from autotune.study.dashboard.notes import settings_of

_PREFIX = "artifacts:"
_NAMESPACE = uuid.UUID("6f1c35f4-0c6a-4cf0-9d3e-6a6f1b0e7a11")


def _settings(trial: FrozenTrial) -> bytes | None:
    settings = settings_of(trial)
    return yaml.safe_dump(dict(settings), sort_keys=False).encode() if settings else None


def _log(told: Trial) -> str | None:
    return told.measurement.printed or None


def _failure(told: Trial) -> str | None:
    failure = told.measurement.failure
    return None if failure is None else failure.excerpt or failure.evidence


def _memory(told: Trial) -> str:
    return json.dumps(records.plain(told.measurement.memory), indent=1)


def _timeline(told: Trial) -> str | None:
    """A table that a spreadsheet opens as well as a plot."""
    course = told.measurement.memory.timeline
    rows = (f"{moment.seconds},{moment.peak_bytes},{moment.phase or ''}" for moment in course)
    return "\n".join(["seconds,peak_bytes,phase", *rows, ""]) if course else None


def _of_measurement(make: Callable[[Trial], str | None]) -> Callable[[FrozenTrial], bytes | None]:
    def made(trial: FrozenTrial) -> bytes | None:
        told = records.read_trial(trial)
        text = make(told) if told else None
        return None if text is None else text.encode()

    return made


KINDS: dict[str, tuple[str, Callable[[FrozenTrial], bytes | None]]] = {
    "settings.yaml": ("text/plain", _settings),
    "output.log": ("text/plain", _of_measurement(_log)),
    "failure.log": ("text/plain", _of_measurement(_failure)),
    "memory.json": ("application/json", _of_measurement(_memory)),
    "memory.csv": ("text/csv", _of_measurement(_timeline)),
}
"""File name, its type, and what makes it."""


def _id(trial: FrozenTrial, name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{trial._trial_id}/{name}"))


def of_trial(trial: FrozenTrial) -> dict[str, Any]:
    """Where the dashboard looks for a trial's artifacts."""
    return {
        f"{_PREFIX}{_id(trial, name)}": json.dumps(
            {"artifact_id": _id(trial, name), "mimetype": kind, "encoding": None, "filename": f"trial-{trial.number}-{name}"}
        )
        for name, (kind, make) in KINDS.items()
        if make(trial) is not None
    }


class RecordedArtifacts:
    """An artifact store without files."""

    def __init__(self, trials: Callable[[], Sequence[FrozenTrial]]) -> None:
        self._trials = trials

    def open_reader(self, artifact_id: str) -> BinaryIO:
        for content in self._contents(artifact_id):
            return io.BytesIO(content)
        raise ArtifactNotFound(f"No trial of this study has an artifact {artifact_id}.")

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        _refuse()

    def remove(self, artifact_id: str) -> None:
        _refuse()

    def _contents(self, artifact_id: str) -> Iterator[bytes]:
        for trial in self._trials():
            for name, (_, make) in KINDS.items():
                if _id(trial, name) == artifact_id and (content := make(trial)) is not None:
                    yield content


def _refuse() -> NoReturn:
    raise PermissionError("The dashboard shows a study, and changes nothing in it.")
