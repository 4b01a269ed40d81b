"""Commands whose processes see emulated cards: their environment, their peaks, and the first error
of a command that fails.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from autotune.core.errors import BadInput
from autotune.core.secrets import without_side_effects
from autotune.emulator import reports
from autotune.emulator.build import Built, build, look
from autotune.emulator.cards import EmulatedMachine
from autotune.emulator.reports import RunReport
from autotune.machine.hardware_detection import EMULATED_MACHINE

INJECTED = Path(__file__).parent / "inject"

_DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "DS_BUILD_OPS": "0",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    "RAY_LD_PRELOAD_ON_WORKERS": "1",
    "RAY_worker_niceness": "0",
}
"""Defaults that the user's environment overrides. vLLM's second runner counts tokens inside a
Triton kernel, so that generation never ends; FlashInfer compiles its sampler with nvcc;
DeepSpeed's operators need nvcc too; humming (of vLLM) compiles a launcher of quantised kernels
at every import; Ray removes preloaded libraries from workers, and runs them at niceness 15,
while everything is computed on the host.
"""


KEPT_LINES = 4000

_INNER = ("/torch/", str(INJECTED))
"""Parts of paths outside the command: torch's, and the emulator's below it."""

_PLACE = re.compile(
    r'\s*(?:\[rank\d+\]:\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)'
)
_ERROR = re.compile(
    r"(?:\[rank\d+\]:\s*)?(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (?P<text>.+)"
)


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Running machine. Processes with the same folder share its cards."""

    folder: Path
    built: Built

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    def report(self) -> RunReport:
        """Return the driver's own figures of all processes so far."""
        return reports.read(self.reports, self.built.stubs)

    def environment(
        self,
        variables: Mapping[str, str],
        *,
        phases: bool = False,
        stride: int | None = None,
    ) -> dict[str, str]:
        """Return the environment of a command whose processes are to see the emulated cards, from
        the variables of this process.

        `stride`: number of tokens for which a decoded one stands (`inject/emulator_rollouts.py`).
        """
        added = {
            "LD_PRELOAD": _before(self.built.library, variables.get("LD_PRELOAD")),
            "LD_LIBRARY_PATH": _before(self.built.folder, variables.get("LD_LIBRARY_PATH")),
            "PYTHONPATH": _before(INJECTED, variables.get("PYTHONPATH")),
            "TRITON_LIBCUDA_PATH": str(self.built.folder),
            # A cluster that already runs is found by these two, and its workers see no emulated
            # card.
            "RAY_TMPDIR": str(self.folder),
            "RAY_ADDRESS": "",
            **self._variables(),
        }
        if phases:
            added["AUTOTUNE_EMULATOR_PHASES"] = "1"
        if stride is not None:
            added["AUTOTUNE_EMULATOR_STRIDE"] = str(stride)
        return {**_DEFAULTS, **variables, **added}

    def _variables(self) -> dict[str, str]:
        """Return the variables by which the library finds its machine."""
        return {
            EMULATED_MACHINE: str(self.folder / "machine"),
            "AUTOTUNE_EMULATED_STATE": str(self.folder / "state"),
            "AUTOTUNE_EMULATOR_REPORT": str(self.reports),
        }

    def nvml(self) -> ModuleType:
        """Return nvidia-ml-py's module, bound to these cards, for the process that watches them
        from outside.

        The module is a copy of its own and so is the library: a process may watch several machines,
        real ones among them.
        """
        module = _copy_of_pynvml(f"pynvml of {self.folder.name}")
        library = self.folder / "libnvidia-ml-watching.so"
        shutil.copyfile(self.built.library, library)
        with _environment_variables(self._variables()):  # read once, while the library is loaded
            module.nvmlLib = ctypes.CDLL(str(library))  # type: ignore[attr-defined]
        return module


def set_up(
    machine: EmulatedMachine,
    built: Built,
    folder: Path,
) -> Stand:
    """Return a machine in this folder, with nothing on its cards yet."""
    stand = Stand(folder=folder, built=built)
    stand.reports.mkdir(parents=True, exist_ok=True)
    (folder / "machine").write_text(machine.text(built.cuda))
    (folder / "state").unlink(missing_ok=True)
    return stand


def _before(path: Path, variable: str | None) -> str:
    """Put a path in front of the others of a variable."""
    return f"{path}{os.pathsep}{variable}" if variable else str(path)


def _copy_of_pynvml(name: str) -> ModuleType:
    """Return a module of this name with nvidia-ml-py's code."""
    installed = importlib.util.find_spec("pynvml")
    assert installed is not None and installed.origin is not None  # a dependency of autotune
    spec = importlib.util.spec_from_file_location(name, installed.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there
    spec.loader.exec_module(module)
    return module


@contextmanager
def _environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a time."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, kw_only=True)
class CommandFailure:
    """The first error that a command printed."""

    message: str
    place: str | None  # the innermost frame of its traceback that is no library's of torch


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Result of a rehearsal."""

    machine: EmulatedMachine
    code: int  # the command's exit code; below zero the signal that ended it
    report: RunReport
    failure: CommandFailure | None
    output: tuple[str, ...]  # last lines of the command's output


def rehearse(
    command: Sequence[str],
    machine: EmulatedMachine,
    python: Path,
    show: Callable[[str], object],
    *,
    stride: int = 1,
) -> Rehearsed:
    """Run the command, whose processes use the cards of this machine; `show` receives its output.

    `stride`: number of tokens for which a decoded one stands.
    """
    built = build(look(python))
    output: deque[str] = deque(maxlen=KEPT_LINES)
    with tempfile.TemporaryDirectory(
        prefix="autotune-emulated-", ignore_cleanup_errors=True
    ) as folder:
        stand = set_up(machine, built, Path(folder))
        environment = stand.environment(
            without_side_effects(os.environ, Path(folder)),
            phases=True,
            stride=stride if stride > 1 else None,
        )
        code = _run(command, environment, output, show)
        report = stand.report()
    return Rehearsed(
        machine=machine,
        code=code,
        report=report,
        failure=first_failure(output) if code else None,
        output=tuple(output),
    )


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    output: deque[str],
    show: Callable[[str], object],
) -> int:
    """Run the command, whose lines go to `show` and to `output`. Return its exit code."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
        )
    except OSError as error:
        raise BadInput(
            f"COMMAND {command[0]!r} can't be started: {error.strerror or error}.",
            way_out="Write it behind the two dashes.",
        ) from error
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                show(line)
                output.append(line.rstrip("\n"))
        except BaseException:
            process.terminate()  # leaving the block waits for it
            raise
    return process.returncode


def first_failure(lines: Sequence[str]) -> CommandFailure | None:
    """Return the first error of the output; later ones mostly result from it."""
    places: list[str] = []
    for line in lines:
        place = _PLACE.match(line)
        error = _ERROR.match(line)
        if "Traceback (most recent call last)" in line:
            places = []
        elif place is not None:
            places.append(f"{place['file']}:{place['line']} {place['function']}")
        elif error is not None:
            text = f"{error['kind']}: {error['text']}"
            return CommandFailure(message=text, place=_innermost_of_command(places))
    return None


def _innermost_of_command(places: Sequence[str]) -> str | None:
    """Return the innermost frame outside torch; the innermost of all if there is none."""
    for place in reversed(places):
        if not any(part in place for part in _INNER):
            return place
    return places[-1] if places else None
