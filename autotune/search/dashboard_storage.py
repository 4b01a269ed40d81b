"""Read-only storage for the dashboard, with corrected constraints and best trial; notes and
artifacts are derived from the records on request.

The study itself is not changed, so an old one and one under search display alike. optuna-dashboard
0.21 reads constraints from a list that Optuna 5 no longer writes, and takes the best value as the
best trial whether it fits or not. Writes are refused.
"""

from __future__ import annotations

import copy
import io
import json
import re
import uuid
from collections.abc import Container, Mapping, Sequence
from typing import Any, BinaryIO

import yaml
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard._custom_plot_data import SYSTEM_ATTR_PLOT_DATA, split_plot_data
from optuna_dashboard._note import note_ver_key, split_body

from autotune.core.answer import Trial, plain
from autotune.core.units import GIB, format_bytes, format_seconds
from autotune.search.dashboard_server import READ_ONLY, Extras
from autotune.search.trial_storage import CANDIDATE, PREDICTED, WHY, read_trial


class DashboardStorage(BaseStorage):
    """View of one study of another storage."""

    def __init__(self, storage: BaseStorage, study_name: str, extras: Extras) -> None:
        self._under, self._name, self._extras = storage, study_name, extras

    # 1. Derived reads.

    def get_all_studies(self) -> list[FrozenStudy]:
        mine = [
            copy.copy(study)
            for study in self._under.get_all_studies()
            if study.study_name == self._name
        ]
        for study in mine:
            study.system_attrs = self.get_study_system_attrs(study._study_id)
            study.user_attrs = self.get_study_user_attrs(study._study_id)
        return mine

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        trials, extras = self._under.get_all_trials(study_id, deepcopy=False), self._extras
        shown = _as_note(extras.note or _note_while_searching(trials), None) | _drawn(
            extras.figures
        )
        for trial in trials:
            shown |= _as_note(_note_of(trial), trial._trial_id)
        # Notes written by hand take precedence over derived ones.
        return {**shown, **self._under.get_study_system_attrs(study_id)}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [
            self._shown(trial)
            for trial in self._under.get_all_trials(study_id, deepcopy=deepcopy, states=states)
        ]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._shown(self._under.get_trial(trial_id))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        best = _best_that_fits(
            self._under.get_all_trials(study_id, deepcopy=False), self._extras.best_trial
        )
        if best is None:
            raise ValueError("No trial fits yet.")
        return self._shown(best)

    def _shown(self, trial: FrozenTrial) -> FrozenTrial:
        shown = copy.copy(trial)
        shown.user_attrs = _facts_of(trial)
        old_constraints = {"constraints": list(trial.constraints.values())}
        shown._system_attrs = {**trial._system_attrs, **old_constraints, **_artifacts_of(trial)}
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

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = (
        create_new_trial
    ) = set_trial_param = _refuse
    set_trial_state_values = set_trial_intermediate_value = set_trial_user_attr = (
        set_trial_system_attr
    ) = _refuse


def _best_that_fits(trials: Sequence[FrozenTrial], recommended: int | None) -> FrozenTrial | None:
    """Return the recommended trial, or the fastest whose constraints hold."""
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    fitting = [
        trial for trial in complete if all(amount <= 0 for amount in trial.constraints.values())
    ]
    chosen = next((trial for trial in fitting if trial.number == recommended), None)
    return chosen or max(fitting, key=lambda trial: trial.value or float("-inf"), default=None)


def _note_while_searching(trials: Sequence[FrozenTrial]) -> str:
    best = _best_that_fits(trials, None)
    done = sum(trial.state.is_finished() for trial in trials)
    found = (
        f"the fastest that fits so far is trial {best.number}"
        if best
        else "nothing has fitted so far"
    )
    return f"{done} trials on record; {found}. There is no recommendation yet."


def _drawn(figures: Mapping[str, str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for title, figure in figures.items():
        attributes |= split_plot_data(figure, f"{SYSTEM_ATTR_PLOT_DATA}{title}:")
    return attributes


# Notes: Markdown derived from the records.
MAX_LINES = 12
MAX_COLUMNS = 80


def _as_note(body: str, trial_id: int | None) -> dict[str, Any]:
    """Return a note as attributes of the dashboard. Version 0, so that one written by hand is
    newer.
    """
    return {note_ver_key(trial_id): 0, **split_body(body, trial_id)} if body else {}


def _note_of(frozen: FrozenTrial) -> str:
    """Return the candidate's outcome and its reason."""
    trial = read_trial(frozen)
    if trial is not None:
        return "\n\n".join(_paragraphs(trial))
    why, predicted = str(frozen.user_attrs.get(WHY, "")), frozen.user_attrs.get(PREDICTED)
    if predicted:
        return (
            f"**screened**: {why}. Nothing was measured; predicted"
            f" figures:\n\n{_fenced(json.dumps(predicted, indent=1))}"
        )
    return why


def _paragraphs(trial: Trial) -> list[str]:
    measured, speed = trial.measurement, trial.measurement.ranking_speed
    memory, cost = measured.memory, measured.cost
    parts = [f"**{measured.outcome}** ({trial.purpose}): {trial.verdict.why}"]
    if speed is not None:
        parts.append(
            f"{speed.tokens_per_second:,.0f} tokens/s at completions of {speed.completion_tokens}"
            " tokens"
        )
    if memory.peak_bytes is not None:
        parts.append(
            f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.limit_bytes)}, limited"
            f" by {memory.bound_by}"
        )
    parts.append(
        f"took {format_seconds(cost.total_seconds)}, of that loading"
        f" {format_seconds(cost.load_seconds)}"
    )
    if measured.failure is not None:
        parts.append(
            f"cause: {measured.failure.cause or 'unknown'}; phase:"
            f" {measured.failure.phase or 'unknown'}"
        )
        lines = (measured.failure.excerpt or measured.failure.evidence).strip().splitlines()
        parts.append(
            _fenced("\n".join(_short(line) for line in lines[-MAX_LINES:]))
        )  # failure.log has all of them
    return parts


def _short(value: Any) -> Any:
    """Return the value; a text is cut to the page's width, since the page wraps no attribute."""
    return (
        f"{value[: MAX_COLUMNS - 4]} ..."
        if isinstance(value, str) and len(value) > MAX_COLUMNS
        else value
    )


def _fenced(text: str) -> str:
    """Return a fenced block with a fence that does not occur in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _facts_of(frozen: FrozenTrial) -> dict[str, Any]:
    """Return flat columns for sorting; the records are nested too deeply for the dashboard."""
    trial = read_trial(frozen)
    plain = {
        key: _short(value)
        for key, value in frozen.user_attrs.items()
        if isinstance(value, str | int | float | bool)
    }
    if trial is None:
        return plain
    measured, speed = trial.measurement, trial.measurement.ranking_speed
    peak = measured.memory.peak_bytes
    return {
        **plain,
        "fits": trial.verdict.fits,
        **({"tokens per second": round(speed.tokens_per_second, 1)} if speed else {}),
        **({"peak GiB": round(peak / GIB, 3)} if peak is not None else {}),
        "seconds": round(measured.cost.total_seconds, 1),
        **({"cause": measured.failure.cause or "unknown"} if measured.failure else {}),
    }


# Artifacts: settings, output, failure, memory over time.
_PREFIX = "artifacts:"
_NAMESPACE = uuid.UUID("6f1c35f4-0c6a-4cf0-9d3e-6a6f1b0e7a11")


def _files_of(trial: FrozenTrial) -> dict[str, tuple[str, str]]:
    """Return MIME type and content by file name."""
    found = {}
    candidate = trial.user_attrs.get(CANDIDATE)
    if isinstance(candidate, dict) and (settings := candidate.get("settings")):
        found["settings.yaml"] = "text/plain", yaml.safe_dump(dict(settings), sort_keys=False)
    if (measured := read_trial(trial)) is None:
        return found
    memory, failure = measured.measurement.memory, measured.measurement.failure
    if measured.measurement.printed:
        found["output.log"] = "text/plain", measured.measurement.printed
    if failure is not None:
        found["failure.log"] = "text/plain", failure.excerpt or failure.evidence
    found["memory.json"] = "application/json", json.dumps(plain(memory), indent=1)
    if memory.timeline:
        rows = (
            f"{moment.seconds},{moment.peak_bytes},{moment.phase or ''}"
            for moment in memory.timeline
        )
        found["memory.csv"] = "text/csv", "\n".join(["seconds,peak_bytes,phase", *rows, ""])
    return found


def _id(trial: FrozenTrial, name: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{trial._trial_id}/{name}"))


def _artifacts_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return the attributes that list a trial's artifacts for the dashboard."""
    return {
        f"{_PREFIX}{_id(trial, name)}": json.dumps(
            {
                "artifact_id": _id(trial, name),
                "mimetype": kind,
                "encoding": None,
                "filename": f"trial-{trial.number}-{name}",
            }
        )
        for name, (kind, _) in _files_of(trial).items()
    }


class RecordedArtifacts:
    """Artifact store without files."""

    def __init__(self, storage: BaseStorage, study_name: str) -> None:
        self._under, self._id = storage, storage.get_study_id_from_name(study_name)

    def open_reader(self, artifact_id: str) -> BinaryIO:
        for trial in self._under.get_all_trials(self._id, deepcopy=False):
            for name, (_, content) in _files_of(trial).items():
                if _id(trial, name) == artifact_id:
                    return io.BytesIO(content.encode())
        raise ArtifactNotFound(f"No trial of this study has an artifact {artifact_id}.")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(READ_ONLY)

    write = remove = _refuse
