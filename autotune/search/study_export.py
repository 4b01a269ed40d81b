"""Export of a study to one JSON file, and import into another database.

The trials are in the form of Optuna's storage; their user attributes are those of `trial_storage`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import BadInput
from autotune.core.files import read_json
from autotune.core.units import MIB
from autotune.search.storage import open_storage, set_metric_names, the_study_in

SCHEMA = 1
MAX_BYTES = 128 * MIB
MAX_VALUES = 2_000_000
MAX_REASON_LENGTH = 200  # Characters of Optuna's message that are quoted


class MovedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Trial in the fields of Optuna's storage."""

    state: str
    params: Mapping[str, Any]
    distributions: Mapping[str, str]
    user_attrs: Mapping[str, Any]
    constraints: Mapping[str, float] = {}
    values: tuple[float, ...] | None = None
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None


class MovedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Study with its finished trials."""

    schema: int
    name: str
    metric_names: tuple[str, ...]
    user_attrs: Mapping[str, Any]
    trials: tuple[MovedTrial, ...]


def packed(url: str, name: str | None) -> MovedStudy:
    """Return the study in this storage, without running trials, which have no outcome yet."""
    storage = open_storage(url)
    study_name = the_study_in(storage, name, url)
    study = optuna.load_study(study_name=study_name, storage=storage)
    trials = study.get_trials(deepcopy=False)
    finished = [trial for trial in trials if trial.state.is_finished()]
    return MovedStudy(
        schema=SCHEMA,
        name=study.study_name,
        metric_names=tuple(study.metric_names or ()),
        user_attrs=study.user_attrs,
        trials=tuple(_packed_trial(trial) for trial in finished),
    )


def _packed_trial(trial: FrozenTrial) -> MovedTrial:
    distributions = {}
    for name, distribution in trial.distributions.items():
        distributions[name] = distribution_to_json(distribution)
    return MovedTrial(
        state=trial.state.name,
        params=trial.params,
        distributions=distributions,
        user_attrs=trial.user_attrs,
        constraints=trial.constraints,
        values=None if trial.values is None else tuple(trial.values),
        started=trial.datetime_start,
        ended=trial.datetime_complete,
    )


def encode(moved: MovedStudy) -> bytes:
    encoded = msgspec.json.encode(moved)
    return msgspec.json.format(encoded, indent=1) + b"\n"


def read(file: Path) -> MovedStudy:
    """Read an exported file; BadInput if it is none."""
    way_out = "Name a file that `autotune study export` wrote."
    moved = read_json(
        file,
        MovedStudy,
        largest_bytes=MAX_BYTES,
        way_out=way_out,
        most_values=MAX_VALUES,
    )
    if moved.schema != SCHEMA:
        raise BadInput(
            f"{file} has schema {moved.schema}; this version reads schema {SCHEMA}.",
            way_out=way_out,
        )
    return moved


def unpack(
    moved: MovedStudy,
    url: str,
    name: str,
) -> None:
    """Create a study of this name with these trials; BadInput if it exists already or a trial is
    inconsistent.
    """
    storage = open_storage(url)
    names = {study.study_name for study in storage.get_all_studies()}
    if name in names:
        raise BadInput(
            f"The storage already holds a study {name!r}.",
            way_out="Give this one another name with --study NAME.",
        )
    trials = []
    for number, packed in enumerate(moved.trials):
        trial = _unpacked_trial(number, packed)
        trials.append(trial)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction="maximize",
    )
    try:
        for key, value in moved.user_attrs.items():
            study.set_user_attr(key, value)
        if moved.metric_names:
            set_metric_names(study, moved.metric_names)
        study.add_trials(trials)
    except BaseException as error:
        # All or nothing: half a study would be continued by --resume.
        optuna.delete_study(study_name=name, storage=storage)
        if not isinstance(error, Exception):
            raise
        raise BadInput(
            f"The study can't be stored: {_reason(error)}.", way_out="Export the study again."
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    return reason[:MAX_REASON_LENGTH].rstrip(".")


def _unpacked_trial(number: int, moved: MovedTrial) -> FrozenTrial:
    try:
        distributions = {}
        for name, text in moved.distributions.items():
            distributions[name] = json_to_distribution(text)
        trial = optuna.trial.create_trial(
            state=TrialState[moved.state],
            params=dict(moved.params),
            distributions=distributions,
            user_attrs=dict(moved.user_attrs),
            constraints=dict(moved.constraints),
            values=None if moved.values is None else list(moved.values),
        )
    except Exception as error:  # Optuna raises several types for inconsistent fields
        raise BadInput(
            f"Trial {number} of the file is invalid: {str(error).rstrip('.')}.",
            way_out="Export the study again.",
        ) from error
    if moved.started:
        trial.datetime_start = moved.started
    if moved.ended:
        trial.datetime_complete = moved.ended
    return trial
