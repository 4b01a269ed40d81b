"""Exceptions that autotune raises on purpose.

AutotuneError                     base class
├── BadInput                      invalid request: the rule, the value, the fix
│   ├── UnknownName               unknown model, GPU, knob or space, with the nearest names
│   ├── IllegalConfiguration      the framework rejects this combination of settings
│   ├── HardwareNotHere           the requested GPUs are not on this machine
│   ├── MissingExtra              an optional dependency is not installed, with the pip line
│   ├── CannotPredict             a step that cannot be traced without a GPU, with its operation
│   └── StudyMismatch             the storage holds a study of this name for another request
├── TrainingEnvironmentError      the interpreter of --python cannot run the framework
├── StorageLost                   the study's database does not answer any more
└── ProbeError                    failure of the machine, not of the candidate: retried, reported
    └── SlotLost                  the slot is lost as well; other slots continue

Exit codes are defined in `autotune.cli.exit_codes` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from autotune.core.installation import pip_requirement

MAX_CHOICES = 6  # choices that a message lists if none is near


class AutotuneError(Exception):
    """Base of all exceptions that autotune raises on purpose."""


class BadInput(AutotuneError):
    """Invalid value: `what` names the problem, `way_out` the fix."""

    def __init__(self, sentence: str, *, way_out: str = "") -> None:
        self.what = sentence
        self.way_out = way_out
        super().__init__(f"{sentence} {way_out}".strip())


class UnknownName(BadInput):
    """Unknown name; the message offers the nearest known names."""

    def __init__(
        self,
        kind: str,
        name: str,
        choices: Iterable[str],
        *,
        listing: str = "",
    ) -> None:
        sentences = [suggestion(name, choices)]
        if listing:
            sentences.append(f"`{listing}` lists them all.")
        way_out = " ".join(sentences).strip()
        super().__init__(f"Unknown {kind} {name!r:.100}.", way_out=way_out)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return a question with the choices nearest to the name, or a few choices; empty if there
    are none.
    """
    by_lower_case: dict[str, str] = {}
    for choice in sorted(choices):
        by_lower_case[choice.lower()] = choice
    matches = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.4)
    if not matches and len(by_lower_case) <= MAX_CHOICES:
        matches = list(by_lower_case)
    nearest = list(map(by_lower_case.__getitem__, matches))
    if not nearest:
        return ""
    *first, last = map(repr, nearest)
    if first:
        return f"Did you mean {', '.join(first)} or {last}?"
    return f"Did you mean {last}?"


class IllegalConfiguration(BadInput):
    """Combination of settings that the framework rejects."""


class HardwareNotHere(BadInput):
    """Requested hardware that is not on this machine and cannot be measured here."""


class MissingExtra(BadInput):
    """Optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the extra {extra!r}, which is not installed.",
            way_out=f"Install it with: pip install {pip_requirement(extra)}",
        )


class CannotPredict(BadInput):
    """Configuration without a reliable prediction."""


class NotModelled(CannotPredict):
    """Setting without a counterpart in the model of a step.

    `instead`: a value that is modelled; `effect`: the meaning of a prediction with it for the
    training, empty if it has none.
    """

    def __init__(
        self,
        sentence: str,
        *,
        way_out: str,
        setting: str,
        instead: bool | int | float | str | None,
        effect: str,
    ) -> None:
        super().__init__(sentence, way_out=way_out)
        self.setting = setting
        self.instead = instead
        self.effect = effect


class StudyMismatch(BadInput):
    """Study of this name that belongs to another request."""


class TrainingEnvironmentError(AutotuneError):
    """Interpreter that cannot run the training loop, or with an unsupported framework version."""


class StorageLost(AutotuneError):
    """Study database that did not come back in time."""


class ProbeError(AutotuneError):
    """Probe failure with a cause other than the candidate."""


class SlotLost(ProbeError):
    """Slot that cannot measure any more: its machine or device was lost."""
