"""Read-only storage for the dashboard, with corrected constraints and best trial.

optuna-dashboard 0.21 reads constraints from a list that Optuna 5 no longer writes, and takes the
best value as the best trial whether it fits or not. Writes are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune.search.dashboard import artifacts, notes
from autotune.search.dashboard.guard import READ_ONLY


class DashboardStorage(BaseStorage):
    """View of one study of another storage."""

    def __init__(
        self,
        storage: BaseStorage,
        study_name: str,
        *,
        of_study: Callable[[Sequence[FrozenTrial]], Mapping[str, Any]],
        best: Callable[[Sequence[FrozenTrial]], FrozenTrial | None],
    ) -> None:
        """`of_study` derives its attributes for display from its trials, `best` the best of them."""
        self._under, self._name, self._of_study, self._best = storage, study_name, of_study, best

    # 1. Derived reads.

    def get_all_studies(self) -> list[FrozenStudy]:
        mine = [copy.copy(study) for study in self._under.get_all_studies() if study.study_name == self._name]
        for study in mine:
            study.system_attrs = self.get_study_system_attrs(study._study_id)
            study.user_attrs = self.get_study_user_attrs(study._study_id)
        return mine

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        own = self._under.get_study_system_attrs(study_id)
        # Notes written by hand take precedence over derived ones.
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
        shown.user_attrs = notes.facts_of(trial)
        old_constraints = {"constraints": list(trial.constraints.values())}
        shown._system_attrs = {**trial._system_attrs, **old_constraints, **artifacts.of_trial(trial)}
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

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = create_new_trial = set_trial_param = _refuse
    set_trial_state_values = set_trial_intermediate_value = set_trial_user_attr = set_trial_system_attr = _refuse
