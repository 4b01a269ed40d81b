"""Trials as Optuna keeps them: plain JSON in user attributes, so that a study can be read without autotune."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import optuna
from optuna.trial import FrozenTrial

from autotune.candidate import Candidate
from autotune.measurement import Measurement
from autotune.recommendation import Expected, Purpose, Trial
from autotune.verdict import judge

CANDIDATE, PURPOSE, EXPECTED, MEASUREMENT, OUTCOME, WHY = "candidate", "purpose", "expected", "measurement", "outcome", "why"
DRIVER = "driver"
"""Who asked for it, where several may: a trial is its driver's from the first moment, before it says what it is about."""


def plain(value: object) -> Any:
    """Anything of ours as what JSON knows."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode)


def _encode(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    return str(value)


def candidate_attributes(candidate: Candidate, purpose: Purpose) -> dict[str, Any]:
    """Written before the measurement, so that a trial whose driver dies still says what it was about."""
    parts: Mapping[str, Any] = {"knobs": candidate.knobs, "settings": candidate.settings, "load": candidate.load}
    return {CANDIDATE: plain({name: dict(part) for name, part in parts.items()}), PURPOSE: purpose}


def read_trial(frozen: FrozenTrial) -> Trial | None:
    """The trial that was told, or None for one that never got its measurement."""
    attributes = frozen.user_attrs
    if MEASUREMENT not in attributes:
        return None
    measurement = msgspec.convert(attributes[MEASUREMENT], Measurement)
    return Trial(
        number=frozen.number,
        purpose=attributes[PURPOSE],
        candidate=Candidate(**attributes[CANDIDATE]),
        measurement=measurement,
        verdict=judge(measurement),
        expected=msgspec.convert(attributes.get(EXPECTED), Expected | None),
    )


def trials_of(study: optuna.Study) -> tuple[Trial, ...]:
    """All that were told."""
    found = (read_trial(frozen) for frozen in study.get_trials(deepcopy=False))
    return tuple(trial for trial in found if trial is not None)
