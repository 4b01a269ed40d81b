"""A study as one JSON file, and back: to another machine, into another database."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import BadInput
from autotune.files import read_json
from autotune.study.storage import open_storage, the_study_in
from autotune.units import MIB

SCHEMA = 1
LARGEST_BYTES = 1024 * MIB


class MovedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial, in the words of Optuna's own storage."""

    state: str
    params: Mapping[str, Any]
    distributions: Mapping[str, str]
    user_attrs: Mapping[str, Any]
    constraints: Mapping[str, float] = {}
    values: tuple[float, ...] | None = None
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None


class MovedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """A whole study."""

    schema: int
    name: str
    metric_names: tuple[str, ...]
    user_attrs: Mapping[str, Any]
    trials: tuple[MovedTrial, ...]


def packed(url: str, name: str | None) -> MovedStudy:
    """The study in this storage. Trials that are still running have no outcome to move, and stay behind."""
    storage = open_storage(url)
    study = optuna.load_study(study_name=the_study_in(storage, name, url), storage=storage)
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    return MovedStudy(
        schema=SCHEMA,
        name=study.study_name,
        metric_names=tuple(study.metric_names or ()),
        user_attrs=study.user_attrs,
        trials=tuple(_packed(trial) for trial in trials),
    )


def encode(moved: MovedStudy) -> bytes:
    return msgspec.json.format(msgspec.json.encode(moved), indent=1) + b"\n"


def read(file: Path) -> MovedStudy:
    """BadInput where the file is not one that `packed` made."""
    way_out = "Name a file that `autotune study export` wrote."
    moved = read_json(file, MovedStudy, largest_bytes=LARGEST_BYTES, way_out=way_out)
    if moved.schema != SCHEMA:
        raise BadInput(f"{file} has schema {moved.schema}, and this version reads {SCHEMA}.", way_out=way_out)
    return moved


def unpack(moved: MovedStudy, url: str, name: str) -> None:
    """A new study of this name with the same trials; BadInput where there is one already, or a trial makes no sense."""
    storage = open_storage(url)
    if name in {study.study_name for study in storage.get_all_studies()}:
        raise BadInput(f"The storage already holds a study {name!r}.", way_out="Give this one another name with --study NAME.")
    trials = [_unpacked(number, trial) for number, trial in enumerate(moved.trials)]
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize")
    for key, value in moved.user_attrs.items():
        study.set_user_attr(key, value)
    if moved.metric_names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(moved.metric_names))
    study.add_trials(trials)


def _packed(trial: FrozenTrial) -> MovedTrial:
    return MovedTrial(
        state=trial.state.name,
        params=trial.params,
        distributions={name: distribution_to_json(distribution) for name, distribution in trial.distributions.items()},
        user_attrs=trial.user_attrs,
        constraints=trial.constraints,
        values=None if trial.values is None else tuple(trial.values),
        started=trial.datetime_start,
        ended=trial.datetime_complete,
    )


def _unpacked(number: int, trial: MovedTrial) -> FrozenTrial:
    try:
        made = optuna.trial.create_trial(
            state=TrialState[trial.state],
            params=dict(trial.params),
            distributions={name: json_to_distribution(text) for name, text in trial.distributions.items()},
            user_attrs=dict(trial.user_attrs),
            constraints=dict(trial.constraints),
            values=None if trial.values is None else list(trial.values),
        )
    except Exception as error:  # Optuna has many words for what does not go together
        raise BadInput(f"Trial {number} of the file makes no sense: {error}.", way_out="Export the study again.") from error
    made.datetime_start, made.datetime_complete = trial.started or made.datetime_start, trial.ended or made.datetime_complete
    return made
