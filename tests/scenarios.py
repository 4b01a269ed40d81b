"""Scenario folders of examples/, run with the flags of their pages and one tracing process for
all of them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import KnobValue
from autotune.estimate.unknown_facts import FactVariant
from autotune.frameworks.base import Trainer
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService
from autotune.prediction.tracer_pool import TracerPool
from autotune.request.flags import Flags, flags_of, typed
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCENARIOS = sorted(file.parent for file in EXAMPLES.glob("*/scenario.yaml"))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Folder with the content of its scenario.yaml."""

    folder: Path
    document: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Scenario:
        return cls(folder=folder, document=yaml.safe_load((folder / "scenario.yaml").read_text()))

    def failing(self, **flags: Any) -> Flags:
        """The configuration that failed; what is not public of it is unknown."""
        return _flags({**self.document["failing"], **flags})

    def run(self) -> Flags:
        return _flags(self.document["run"])

    def worst(self) -> Flags:
        """The failing one with what is unknown taken where the flips start from."""
        failing = {**self.document["failing"], "unknown": {}}
        return _flags(
            {**failing, "set": {**failing.get("set", {}), **self.document.get("flips_from", {})}}
        )

    def flipped(self, change: Mapping[str, Any]) -> Flags:
        failing = {**self.document["failing"], "unknown": {}}
        by_flag = {
            name: value for name, value in change.items() if name in failing
        }  # what has a flag of its own is said there
        by_set = {name: value for name, value in change.items() if name not in failing}
        return _flags(
            {
                **failing,
                **by_flag,
                "set": {**failing.get("set", {}), **self.document.get("flips_from", {}), **by_set},
            }
        )

    def commands(self) -> list[list[str]]:
        """Return the command lines."""
        return [
            ["autotune", "predict", *typed(self.failing())],
            ["autotune", "run", *typed(self.run())],
        ]


def _flags(values: Mapping[str, Any]) -> Flags:
    return flags_of({name: value for name, value in values.items() if value or value is False})


class Kept:
    """A foresight's tracing processes, which outlive it."""

    def __init__(self, tracers: TracerPool) -> None:
        self._tracers = tracers

    def trace(self, specification: Mapping[str, Any], until: float = math.inf) -> Any:
        return self._tracers.trace(specification, until=until)

    def expect(self, specifications: Any) -> None:
        self._tracers.expect(specifications)

    def close(self) -> None:
        """Keep the processes for the next scenario."""


class Oracle:
    """Predictor whose tracing processes are started once for each kind of step."""

    def __init__(self) -> None:
        self._tracers: dict[str, TracerPool] = {}

    def open(self, job: Job, trainer: Trainer) -> PredictionService:
        if trainer.trace_adapter not in self._tracers:
            self._tracers[trainer.trace_adapter] = open_tracers(job.task, trainer)
        tracer: Any = Kept(self._tracers[trainer.trace_adapter])
        return PredictionService(
            task=job.task,
            trainer=trainer,
            limit_bytes=job.memory_limit_bytes,
            tracer=tracer,
        )

    def ways(self, flags: Flags) -> list[FactVariant]:
        """Return every combination of unknown facts, without a search for remedies, which would
        trace many more steps.
        """
        predicted = []
        for facts, sources in read_sources(flags, mode="predict").variants():
            predicted.append(self._way(facts, sources.parse()))
        return predicted

    def _way(self, facts: Mapping[str, KnobValue], understood: ParsedRequest) -> FactVariant:
        candidate = candidate_of_job(understood)
        foresight = self.open(understood.job, understood.trainer)
        return FactVariant(
            facts=facts,
            candidate=candidate,
            prediction=foresight.predict(candidate),
        )

    def predict(self, flags: Flags) -> Prediction:
        """Return the prediction of a configuration without unknown facts."""
        (way,) = self.ways(flags)
        return way.prediction

    def close(self) -> None:
        for tracers in self._tracers.values():
            tracers.close()


def portable(text: str, out: Path) -> str:
    """Return the text without the folders of the machine that wrote it: the interpreter's and the
    output's."""
    binaries = Path(sys.executable).parent
    return (
        text.replace(sys.executable, "python")
        .replace(f"{binaries}/", "")
        .replace(str(out), "recommended")
    )


@contextlib.contextmanager
def one_oracle() -> Iterator[Oracle]:
    """Meanwhile `predict` and `run` ask it as well."""
    oracle = Oracle()
    with pytest.MonkeyPatch.context() as patched, contextlib.closing(oracle):
        patched.setattr("autotune.prediction.service.open_prediction_service", oracle.open)
        yield oracle
