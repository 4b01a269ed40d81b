"""Rehearsal of a command on emulated cards: its output is passed on, its peaks and its first error are kept."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.secrets import without_side_effects
from autotune.emulator import launch, reports
from autotune.emulator.build import build
from autotune.emulator.cards import EmulatedMachine
from autotune.emulator.installation import look
from autotune.emulator.reports import RunReport

KEPT_LINES = 4000

_INNER = ("/torch/", str(launch.INJECTED))  # frames outside the command: torch's, and the emulator's below it
_PLACE = re.compile(r'\s*(?:\[rank\d+\]:\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (?P<text>.+)")


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
    command: Sequence[str], machine: EmulatedMachine, python: Path, show: Callable[[str], object], *, stride: int = 1
) -> Rehearsed:
    """Run the command, whose processes use the cards of this machine; `show` receives its output.

    `stride`: number of tokens for which a decoded one stands.
    """
    installation = look(python)
    built = build(installation)
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with tempfile.TemporaryDirectory(prefix="autotune-emulated-", ignore_cleanup_errors=True) as folder:
        stand = launch.set_up(machine, installation, Path(folder))
        environment = launch.environment(
            without_side_effects(os.environ, Path(folder)), built, stand, phases=True, stride=stride if stride > 1 else None
        )
        code = _run(command, environment, last, show)
        report = reports.read(stand.reports, built.stubs)
    failure = first_failure(last) if code else None
    return Rehearsed(machine=machine, code=code, report=report, failure=failure, output=tuple(last))


def _run(command: Sequence[str], environment: dict[str, str], last: deque[str], show: Callable[[str], object]) -> int:
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
        )
    except OSError as error:
        raise BadInput(
            f"COMMAND {command[0]!r} can't be started: {error.strerror or error}.", way_out="Write it behind the two dashes."
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
            return CommandFailure(words=f"{error['kind']}: {error['text']}", place=next(reversed(outside or places), None))
    return None
