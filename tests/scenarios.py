"""The scenario folders of examples/, asked as their pages ask: the same flags, one tracing process for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.asking.flags import Flags, ways_of
from autotune.asking.keywords import flags_of, typed
from autotune.asking.understanding import Understood, candidate_in_question, understand
from autotune.candidate import KnobValue
from autotune.foresight import Foresight, open_tracers
from autotune.predict.unknown import Way
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.rig.tracers import Tracers
from autotune.trainers.base import Trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCENARIOS = sorted(file.parent for file in EXAMPLES.glob("*/scenario.yaml"))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One folder and what its scenario.yaml says."""

    folder: Path
    told: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Scenario:
        return cls(folder=folder, told=yaml.safe_load((folder / "scenario.yaml").read_text()))

    def failing(self, **more: Any) -> Flags:
        """The configuration that failed; what is not public of it is unknown."""
        return _flags({**self.told["failing"], **more})

    def run(self) -> Flags:
        return _flags(self.told["run"])

    def worst(self) -> Flags:
        """The failing one with what is unknown taken where the flips start from."""
        given = {**self.told["failing"], "unknown": {}}
        return _flags({**given, "set": {**given.get("set", {}), **self.told.get("flips_from", {})}})

    def flipped(self, change: Mapping[str, Any]) -> Flags:
        given = {**self.told["failing"], "unknown": {}}
        by_flag = {name: value for name, value in change.items() if name in given}  # what has a flag of its own is said there
        by_set = {name: value for name, value in change.items() if name not in given}
        return _flags({**given, **by_flag, "set": {**given.get("set", {}), **self.told.get("flips_from", {}), **by_set}})

    def commands(self) -> list[list[str]]:
        """As one would type them."""
        return [["autotune", "predict", *typed(self.failing())], ["autotune", "run", *typed(self.run())]]


def _flags(given: Mapping[str, Any]) -> Flags:
    return flags_of({name: value for name, value in given.items() if value or value is False})


class Kept:
    """A foresight's tracing processes, which outlive it."""

    def __init__(self, tracers: Tracers) -> None:
        self._tracers = tracers

    def trace(self, specification: Mapping[str, Any]) -> Any:
        return self._tracers.trace(specification)

    def expect(self, specifications: Any) -> None:
        self._tracers.expect(specifications)

    def close(self) -> None:
        """Not yet: the next scenario asks the same ones."""


class Oracle:
    """Predicts; the processes that follow steps are started once for each kind of step."""

    def __init__(self) -> None:
        self._tracers: dict[str, Tracers] = {}

    def open(self, question: Question, trainer: Trainer) -> Foresight:
        if trainer.trace_adapter not in self._tracers:
            self._tracers[trainer.trace_adapter] = open_tracers(question.job, trainer)
        kept: Any = Kept(self._tracers[trainer.trace_adapter])
        return Foresight(job=question.job, trainer=trainer, limit_bytes=question.memory_limit_bytes, tracer=kept)

    def ways(self, flags: Flags) -> list[Way]:
        """Every way in which what is unknown can be; without looking for what would help, which follows many more steps."""
        return [self._way(facts, understand(given)) for facts, given in ways_of(dataclasses.replace(flags, mode="predict"))]

    def _way(self, facts: Mapping[str, KnobValue], understood: Understood) -> Way:
        candidate = candidate_in_question(understood)
        foresight = self.open(understood.question, understood.trainer)
        return Way(facts=facts, candidate=candidate, prediction=foresight.predict(candidate))

    def predict(self, flags: Flags) -> Prediction:
        """One configuration in which nothing is unknown."""
        (way,) = self.ways(flags)
        return way.prediction

    def close(self) -> None:
        for tracers in self._tracers.values():
            tracers.close()


def portable(text: str, out: Path) -> str:
    """What was written, without the folders of the machine that wrote it: the interpreter's and the output's."""
    binaries = Path(sys.executable).parent
    return text.replace(sys.executable, "python").replace(f"{binaries}/", "").replace(str(out), "recommended")


@contextlib.contextmanager
def one_oracle() -> Iterator[Oracle]:
    """Meanwhile `predict` and `run` ask it as well."""
    oracle = Oracle()
    with pytest.MonkeyPatch.context() as patched, contextlib.closing(oracle):
        patched.setattr("autotune.foresight.open_foresight", oracle.open)
        yield oracle
