"""autotune: before a GRPO run, will it fit, and what is the fastest setting that fits?

The flow, which is also the folder listing:

    model + GPUs + lengths -> Workload, Hardware -> SearchSpace -> Candidate (a Trainer says which are legal)
       -> Executor opens a Rig -> Measurement of the real loop -> Verdict against the memory limit
       -> Study proposes the next candidate ... until -> Recommendation, in the framework's own files
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.api import Predicted, Tuned, diagnose, predict, run
    from autotune.candidate import Candidate
    from autotune.diagnose import Diagnosis
    from autotune.hardware import Hardware
    from autotune.measurement import Measurement, Outcome
    from autotune.preflight.check import Preflight, preflight
    from autotune.question import Question
    from autotune.recommendation import Recommendation
    from autotune.space import Knob, SearchSpace
    from autotune.verdict import Verdict
    from autotune.workload import Workload

__version__ = "0.1.0"

# Public names are looked up on first use, so that importing autotune (or asking for --help) loads nothing heavy.
_HOME = {
    "Candidate": "candidate",
    "Diagnosis": "diagnose",
    "Hardware": "hardware",
    "Knob": "space",
    "Measurement": "measurement",
    "Outcome": "measurement",
    "Predicted": "api",
    "Preflight": "preflight.check",
    "Question": "question",
    "Recommendation": "recommendation",
    "SearchSpace": "space",
    "Tuned": "api",
    "Verdict": "verdict",
    "Workload": "workload",
    "diagnose": "api",
    "predict": "api",
    "preflight": "preflight.check",
    "run": "api",
}

_FUNCTIONS = frozenset(name for name in _HOME if name.islower())

__all__ = [
    "Candidate",
    "Diagnosis",
    "Hardware",
    "Knob",
    "Measurement",
    "Outcome",
    "Predicted",
    "Preflight",
    "Question",
    "Recommendation",
    "SearchSpace",
    "Tuned",
    "Verdict",
    "Workload",
    "__version__",
    "diagnose",
    "predict",
    "preflight",
    "run",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autotune.{_HOME[name]}"), name)


class _Package(ModuleType):
    """Some rooms are called as a function is (`autotune/predict/`, `autotune.predict(...)`). Importing such a room would put it
    in the function's place; `from autotune.predict import ...` finds it without."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
