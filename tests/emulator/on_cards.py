"""Programs under the CUDA build of torch that AUTOTUNE_CUDA_PYTHON names, on emulated cards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import TrainingEnvironmentError
from autotune.emulator import launch
from autotune.emulator.build import Built, build, look
from autotune.emulator.cards import EmulatedMachine, emulated_machine
from autotune.emulator.reports import RunReport

VARIABLE = "AUTOTUNE_CUDA_PYTHON"
"""Interpreter, or several separated by colons: a torch for CUDA 12 beside one for CUDA 13."""

GIB, MIB = 2**30, 2**20


def interpreters() -> list[str]:
    return [python for python in os.environ.get(VARIABLE, "").split(os.pathsep) if python]


@functools.cache
def installed(python: str) -> Built:
    try:
        installation = look(Path(python))
    except TrainingEnvironmentError as error:
        pytest.skip(f"{VARIABLE}: {error}")
    return build(installation)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A program that has ended."""

    code: int
    output: str
    """Printed text, errors included."""

    report: RunReport

    @property
    def answer(self) -> Any:
        """Last printed JSON object; torch may warn after it."""
        for line in reversed(self.output.strip().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise AssertionError(self.output)


@dataclass(frozen=True, kw_only=True)
class Cards:
    """A machine that stands, for one program after the other."""

    python: str
    stand: launch.Stand

    def start(self, program: str, **environment: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen(
            [self.python, "-c", textwrap.dedent(program)],
            env=self.stand.environment(variables, phases=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self, process: subprocess.Popen[str]) -> Ran:
        output, _ = process.communicate()
        return Ran(
            code=process.returncode,
            output=output,
            report=self.stand.report(),
        )

    def run(self, program: str, **environment: str) -> Ran:
        return self.ended(self.start(program, **environment))


@contextmanager
def cards(python: str, machine: EmulatedMachine | str) -> Iterator[Cards]:
    built = installed(python)
    emulated = emulated_machine(machine) if isinstance(machine, str) else machine
    with tempfile.TemporaryDirectory(
        prefix="autotune-emulated-", ignore_cleanup_errors=True
    ) as folder:
        yield Cards(python=python, stand=launch.set_up(emulated, built, Path(folder)))


def run(python: str, machine: EmulatedMachine | str, program: str, **environment: str) -> Ran:
    """Run one program on a machine of its own."""
    with cards(python, machine) as stand:
        return stand.run(program, **environment)
