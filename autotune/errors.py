"""Every way autotune can refuse, drawn as the tree it is.

AutotuneError                     anything this package raises on purpose
├── BadInput                      the question cannot be taken as asked: the rule, the value, the way out
│   ├── UnknownName               a model, GPU, knob or space that is not known, with the nearest choices
│   ├── IllegalConfiguration      the framework itself would refuse this combination
│   ├── HardwareNotHere           the asked GPUs are not on this machine
│   ├── MissingExtra              an optional part of autotune is not installed, with the pip line
│   ├── CannotPredict             a step that cannot be followed without a GPU: which operation or module is in the way
│   └── StudyMismatch             a study of this name holds another question
├── TrainingEnvironmentError      the interpreter behind --python cannot run the framework
├── StorageLost                   the study's database does not answer any more
└── RigError                      a rig broke for a reason that is not the candidate's (retried, then told)
    └── SlotLost                  and its slot is gone with it: others go on

Exit codes belong to `autotune.cli` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base of everything autotune raises on purpose."""


class BadInput(AutotuneError):
    """A rule was broken by a value; `way_out` is what to type instead."""

    def __init__(self, what: str, *, way_out: str = "") -> None:
        self.what = what
        self.way_out = way_out
        super().__init__(f"{what} {way_out}".strip())


class UnknownName(BadInput):
    """A name that nothing here answers to."""

    def __init__(self, kind: str, name: str, choices: Iterable[str], *, listing: str = "") -> None:
        known = sorted(choices)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:6]
        way_out = f"Did you mean {_or(near)}?" if near else ""
        if listing:
            way_out = f"{way_out} `{listing}` lists them all.".strip()
        super().__init__(f"Unknown {kind} {name!r}.", way_out=way_out)


class IllegalConfiguration(BadInput):
    """The framework would refuse this combination of settings."""


class HardwareNotHere(BadInput):
    """The hardware that was asked for is not on this machine, so it cannot be measured here."""


class MissingExtra(BadInput):
    """An optional dependency is absent."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the extra {extra!r}, which is not installed.",
            way_out=f"Install it with: pip install 'grpo-autotune[{extra}]'",
        )


class CannotPredict(BadInput):
    """Prediction has no sound figure for this, and gives none."""


class StudyMismatch(BadInput):
    """The storage already holds a study of this name about another question."""


class TrainingEnvironmentError(AutotuneError):
    """The interpreter that should run the training loop cannot, or has an unsupported framework."""


class StorageLost(AutotuneError):
    """The database in which a study is kept did not come back in time."""


class RigError(AutotuneError):
    """A rig failed for a reason that says nothing about the candidate on it."""


class SlotLost(RigError):
    """The slot itself is gone: its machine was lost, or nothing can be measured there any more."""


def _or(names: list[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]
