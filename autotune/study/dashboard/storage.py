"""A storage as the dashboard should see it: the study's own, with what its pages lack filled in on the way out.

optuna-dashboard 0.21 reads constraints from a list that Optuna 5 no longer writes, and takes the best value for the best trial
whether it fits or not. Reads pass through here and get both right; writes are refused, but notes: a click changes no evidence.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

_OLD_CONSTRAINTS = "constraints"
_NOTE = re.compile(r"dashboard:(\d+:)?note_(ver|str:\d+)")

Filled = Callable[[FrozenTrial], Mapping[str, Any]]
"""From a trial to attributes that it should show."""


class ShownStorage(BaseStorage):
    """One study of another storage, to be looked at."""

    def __init__(
        self,
        storage: BaseStorage,
        study_name: str,
        *,
        of_study: Callable[[Sequence[FrozenTrial]], Mapping[str, Any]],
        of_trial: Filled,
        facts: Filled,
        best: Callable[[Sequence[FrozenTrial]], FrozenTrial | None],
    ) -> None:
        self._under, self._name = storage, study_name
        self._of_study, self._of_trial, self._facts, self._best = of_study, of_trial, facts, best

    # What is shown.

    def get_all_studies(self) -> list[FrozenStudy]:
        mine = [copy.copy(study) for study in self._under.get_all_studies() if study.study_name == self._name]
        for study in mine:
            study.system_attrs = self.get_study_system_attrs(study._study_id)
            study.user_attrs = self.get_study_user_attrs(study._study_id)
        return mine

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        own = self._under.get_study_system_attrs(study_id)
        # What somebody wrote by hand stands; everything else is made anew.
        return {**self._of_study(self._under.get_all_trials(study_id, deepcopy=False)), **own}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [self._shown(trial) for trial in self._under.get_all_trials(study_id, deepcopy=deepcopy, states=states)]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._shown(self._under.get_trial(trial_id))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        best = self._best(self._under.get_all_trials(study_id, deepcopy=False))
        if best is None:
            raise ValueError("No trial fits yet.")
        return self._shown(best)

    def _shown(self, trial: FrozenTrial) -> FrozenTrial:
        shown = copy.copy(trial)
        shown.user_attrs = dict(self._facts(trial))
        shown._system_attrs = {**trial._system_attrs, _OLD_CONSTRAINTS: list(trial.constraints.values()), **self._of_trial(trial)}
        return shown

    # What passes through.

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._under.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._under.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._under.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """None: they hold the whole question as one long line, and the note says it in words."""
        return {}

    def remove_session(self) -> None:
        self._under.remove_session()

    # What may be written, and what may not.

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        if not _NOTE.fullmatch(key):
            _refuse()
        self._under.set_study_system_attr(study_id, key, value)

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        _refuse()

    def delete_study(self, study_id: int) -> None:
        _refuse()

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        _refuse()

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        _refuse()

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        _refuse()

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        _refuse()

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        _refuse()

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        _refuse()

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise PermissionError("The dashboard shows a study, and changes nothing in it but notes.")
