"""autotune: before a GRPO run, will it fit, and what is the fastest setting that fits?

The flow, which is also the folder listing:

    model + GPUs + lengths -> Workload, Hardware -> SearchSpace -> Candidate (a Trainer says which are legal)
       -> Executor opens a Rig -> Measurement of the real loop -> Verdict against the memory limit
       -> Study proposes the next candidate ... until -> Recommendation, in the framework's own files
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.candidate import Candidate
    from autotune.hardware import Hardware
    from autotune.measurement import Measurement, Outcome
    from autotune.question import Question
    from autotune.recommendation import Recommendation
    from autotune.space import Knob, SearchSpace
    from autotune.verdict import Verdict
    from autotune.workload import Workload

__version__ = "0.1.0"

# Public names are looked up on first use, so that importing autotune (or asking for --help) loads nothing heavy.
_HOME = {
    "Candidate": "candidate",
    "Hardware": "hardware",
    "Knob": "space",
    "Measurement": "measurement",
    "Outcome": "measurement",
    "Question": "question",
    "Recommendation": "recommendation",
    "SearchSpace": "space",
    "Verdict": "verdict",
    "Workload": "workload",
}

__all__ = [
    "Candidate",
    "Hardware",
    "Knob",
    "Measurement",
    "Outcome",
    "Question",
    "Recommendation",
    "SearchSpace",
    "Verdict",
    "Workload",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autotune.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
