"""Commands whose processes see emulated cards: their environment, and what a whole one left:
peaks, and its first error.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from autotune.core.errors import BadInput
from autotune.core.secrets import without_side_effects
from autotune.emulator import reports
from autotune.emulator.build import Built, build, look
from autotune.emulator.cards import EmulatedMachine
from autotune.emulator.reports import RunReport

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

_INNER = (
    "/torch/",
    str(INJECTED),
)  # frames outside the command: torch's, and the emulator's below it
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
        self, ours: Mapping[str, str], *, phases: bool = False, stride: int | None = None
    ) -> dict[str, str]:
        """Return the environment of a command whose processes are to see the emulated cards.

        `stride`: number of tokens for which a decoded one stands (`inject/emulator_hooks.py`).
        """
        added = {
            "LD_PRELOAD": _before(self.built.library, ours.get("LD_PRELOAD")),
            "LD_LIBRARY_PATH": _before(self.built.folder, ours.get("LD_LIBRARY_PATH")),
            "PYTHONPATH": _before(INJECTED, ours.get("PYTHONPATH")),
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
        return {**_DEFAULTS, **ours, **added}

    def _variables(self) -> dict[str, str]:
        """Return the variables by which the library finds its machine."""
        return {
            "AUTOTUNE_EMULATED_MACHINE": str(self.folder / "machine"),
            "AUTOTUNE_EMULATED_STATE": str(self.folder / "state"),
            "AUTOTUNE_EMULATOR_REPORT": str(self.reports),
        }

    def nvml(self) -> ModuleType:
        """Return nvidia-ml-py's module, bound to these cards, for the process that watches them
        from outside.

        The module is a copy of its own and so is the library: a process may watch several machines,
        real ones among them.
        """
        original = importlib.util.find_spec("pynvml")
        assert original is not None and original.origin is not None  # a dependency of autotune
        spec = importlib.util.spec_from_file_location(
            f"pynvml of {self.folder.name}", original.origin
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # it looks itself up there
        spec.loader.exec_module(module)
        library = self.folder / "libnvidia-ml-watching.so"
        shutil.copyfile(self.built.library, library)
        named = self._variables()  # the library reads them once, while it is loaded
        before = {name: os.environ.get(name) for name in named}
        os.environ.update(named)
        try:
            module.nvmlLib = ctypes.CDLL(str(library))  # type: ignore[attr-defined]
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return module


def set_up(machine: EmulatedMachine, built: Built, folder: Path) -> Stand:
    """Return a machine in this folder, with nothing on its cards yet."""
    made = Stand(folder=folder, built=built)
    made.reports.mkdir(parents=True, exist_ok=True)
    (folder / "machine").write_text(machine.text(built.cuda))
    (folder / "state").unlink(missing_ok=True)
    return made


def _before(path: Path, others: str | None) -> str:
    return os.pathsep.join([str(path), *([others] if others else [])])


@dataclass(frozen=True, kw_only=True)
class CommandFailure:
    """The first error that a command printed."""

    words: str
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
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with tempfile.TemporaryDirectory(
        prefix="autotune-emulated-", ignore_cleanup_errors=True
    ) as folder:
        stand, ours = (
            set_up(machine, built, Path(folder)),
            without_side_effects(os.environ, Path(folder)),
        )
        code = _run(
            command,
            stand.environment(ours, phases=True, stride=stride if stride > 1 else None),
            last,
            show,
        )
        report = stand.report()
    failure = first_failure(last) if code else None
    return Rehearsed(machine=machine, code=code, report=report, failure=failure, output=tuple(last))


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    last: deque[str],
    show: Callable[[str], object],
) -> int:
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
                last.append(line.rstrip("\n"))
        except BaseException:
            process.terminate()  # leaving the block waits for it
            raise
    return process.returncode


def first_failure(lines: Sequence[str]) -> CommandFailure | None:
    """Return the first error of the output; later ones mostly result from it."""
    places: list[str] = []
    for line in lines:
        place, error = _PLACE.match(line), _ERROR.match(line)
        if "Traceback (most recent call last)" in line:
            places = []
        elif place is not None:
            places.append(f"{place['file']}:{place['line']} {place['function']}")
        elif error is not None:
            outside = [one for one in places if not any(inner in one for inner in _INNER)]
            return CommandFailure(
                words=f"{error['kind']}: {error['text']}",
                place=next(reversed(outside or places), None),
            )
    return None
