"""Read-only storage for the dashboard, with corrected constraints and best trial; notes and
artifacts are derived from the records on request (`dashboard_content`).

The study itself is not changed, so an old one and one under search display alike. optuna-dashboard
0.21 reads constraints from a list that Optuna 5 no longer writes, and takes the best value as the
best trial whether it fits or not. Writes are refused.
"""

from __future__ import annotations

import copy
import io
import json
import uuid
from collections.abc import Container, Mapping
from typing import Any, BinaryIO

from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard._custom_plot_data import SYSTEM_ATTR_PLOT_DATA, split_plot_data
from optuna_dashboard._note import note_ver_key, split_body

from autotune.search.dashboard_content import (
    READ_ONLY,
    best_that_fits,
    columns_of,
    files_of,
    note_of,
    note_while_searching,
)

_ARTIFACTS_PREFIX = "artifacts:"
_ARTIFACTS_NAMESPACE = uuid.UUID("6f1c35f4-0c6a-4cf0-9d3e-6a6f1b0e7a11")
_NOTE_VERSION = 0  # One written by hand is newer


class DashboardStorage(BaseStorage):
    """View of one study of another storage."""

    def __init__(
        self,
        storage: BaseStorage,
        study_name: str,
        *,
        note: str,
        figures: Mapping[str, str],
        best_trial: int | None,
    ) -> None:
        """`note`: of the study, in Markdown. `figures`: plotly figures by title, as JSON.
        `best_trial`: number of the recommended trial.
        """
        self._under = storage
        self._name = study_name
        self._note = note
        self._figures = figures
        self._best_trial = best_trial

    # 1. Derived reads.

    def get_all_studies(self) -> list[FrozenStudy]:
        shown = []
        for study in self._under.get_all_studies():
            if study.study_name == self._name:
                study = copy.copy(study)
                study.system_attrs = self.get_study_system_attrs(study._study_id)
                study.user_attrs = self.get_study_user_attrs(study._study_id)
                shown.append(study)
        return shown

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        trials = self._under.get_all_trials(study_id, deepcopy=False)
        note = self._note or note_while_searching(trials)
        shown = _note_attributes(note, None)
        for title, figure in self._figures.items():
            shown |= split_plot_data(figure, f"{SYSTEM_ATTR_PLOT_DATA}{title}:")
        for trial in trials:
            note = note_of(trial)
            shown |= _note_attributes(note, trial._trial_id)
        # Notes written by hand take precedence over derived ones.
        return {**shown, **self._under.get_study_system_attrs(study_id)}

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        trials = self._under.get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [self._shown(trial) for trial in trials]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        trial = self._under.get_trial(trial_id)
        return self._shown(trial)

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        trials = self._under.get_all_trials(study_id, deepcopy=False)
        best = best_that_fits(trials, self._best_trial)
        if best is None:
            raise ValueError("No trial fits yet.")
        return self._shown(best)

    def _shown(self, trial: FrozenTrial) -> FrozenTrial:
        shown = copy.copy(trial)
        shown.user_attrs = columns_of(trial)
        constraints = list(trial.constraints.values())
        shown._system_attrs = {
            **trial._system_attrs,
            "constraints": constraints,
            **_artifact_attributes(trial),
        }
        return shown

    # 2. Forwarded reads.

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._under.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._under.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._under.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return none: they hold the whole job as one long line, which the note has as text."""
        return {}

    def remove_session(self) -> None:
        self._under.remove_session()

    # 3. Writes: none.

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(READ_ONLY)

    create_new_study = _refuse
    delete_study = _refuse
    set_study_user_attr = _refuse
    set_study_system_attr = _refuse
    create_new_trial = _refuse
    set_trial_param = _refuse
    set_trial_state_values = _refuse
    set_trial_intermediate_value = _refuse
    set_trial_user_attr = _refuse
    set_trial_system_attr = _refuse


def _note_attributes(body: str, trial_id: int | None) -> dict[str, Any]:
    """Return a note as attributes of the dashboard."""
    if not body:
        return {}
    body_parts = split_body(body, trial_id)
    return {note_ver_key(trial_id): _NOTE_VERSION, **body_parts}


def _artifact_attributes(trial: FrozenTrial) -> dict[str, Any]:
    """Return the attributes that list a trial's artifacts for the dashboard."""
    attributes = {}
    for name, (mime_type, _) in files_of(trial).items():
        artifact_id = _artifact_id(trial, name)
        description = {
            "artifact_id": artifact_id,
            "mimetype": mime_type,
            "encoding": None,
            "filename": f"trial-{trial.number}-{name}",
        }
        attributes[f"{_ARTIFACTS_PREFIX}{artifact_id}"] = json.dumps(description)
    return attributes


def _artifact_id(trial: FrozenTrial, name: str) -> str:
    identity = f"{trial._trial_id}/{name}"
    return str(uuid.uuid5(_ARTIFACTS_NAMESPACE, identity))


class RecordedArtifacts:
    """Artifact store without files."""

    def __init__(self, storage: BaseStorage, study_name: str) -> None:
        self._under = storage
        self._study_id = storage.get_study_id_from_name(study_name)

    def open_reader(self, artifact_id: str) -> BinaryIO:
        trials = self._under.get_all_trials(self._study_id, deepcopy=False)
        for trial in trials:
            for name, (_, content) in files_of(trial).items():
                if _artifact_id(trial, name) == artifact_id:
                    return io.BytesIO(content.encode())
        raise ArtifactNotFound(f"No trial of this study has an artifact {artifact_id}.")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(READ_ONLY)

    write = _refuse
    remove = _refuse
