"""autotune: does a GRPO run fit, and which setting that fits is the fastest?

model + GPUs + lengths -> Workload, Hardware -> SearchSpace
    -> Candidate (a Trainer decides which are legal)
    -> Executor opens a ProbeRunner -> Measurement of the real loop
    -> Verdict against the memory limit
    -> the search proposes the next Candidate ... until
    -> Recommendation, in the framework's own files
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.api.answers import PredictAnswer, RunAnswer
    from autotune.api.diagnoses import diagnose
    from autotune.api.predictions import predict
    from autotune.api.run_requests import job, run
    from autotune.core.answer import Recommendation
    from autotune.core.job import Hardware, Job, Workload
    from autotune.core.measurement import Measurement, Outcome, Verdict
    from autotune.core.space import Candidate, Knob, SearchSpace
    from autotune.diagnosis import Diagnosis
    from autotune.preflight.check import Preflight, preflight
    from autotune.solver import solve

__version__ = "0.1.0"

# Public names are imported on first use: `import autotune` and --help load nothing heavy.
_HOMES = {
    "api.answers": ("PredictAnswer", "RunAnswer"),
    "api.diagnoses": ("diagnose",),
    "api.predictions": ("predict",),
    "api.run_requests": ("job", "run"),
    "core.answer": ("Recommendation",),
    "core.job": ("Hardware", "Job", "Workload"),
    "core.measurement": ("Measurement", "Outcome", "Verdict"),
    "core.space": ("Candidate", "Knob", "SearchSpace"),
    "diagnosis": ("Diagnosis",),
    "preflight.check": ("Preflight", "preflight"),
    "solver": ("solve",),
}


def _home_of(name: str) -> str | None:
    """Return the module of a public name."""
    for module, names in _HOMES.items():
        if name in names:
            return module
    return None


__all__ = [
    "Candidate",
    "Diagnosis",
    "Hardware",
    "Job",
    "Knob",
    "Measurement",
    "Outcome",
    "PredictAnswer",
    "Preflight",
    "Recommendation",
    "RunAnswer",
    "SearchSpace",
    "Verdict",
    "Workload",
    "__version__",
    "diagnose",
    "job",
    "predict",
    "preflight",
    "run",
    "solve",
]


def __getattr__(name: str) -> object:
    module = _home_of(name)
    if module is None:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autotune.{module}"), name)


class _Package(ModuleType):
    """Package with a function and a subpackage of the same name (`preflight`).

    Importing the subpackage must not replace the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if _home_of(name) is None or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
