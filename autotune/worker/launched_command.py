"""Adapter for any training command: starts it, reads its output, ends it after enough cycles.

Memory is measured from outside, and the models inside the command's own processes where `watch` has
a table. The request of a measure:

    argv, environment    the command and its variables; OUT in them: a folder of this probe
    files                {"name": "text"} in that folder
    folder               working directory or null
    figures              source of the speed: see `launched_output`
    phases               [[regex, phase | null], ...]: printed lines that start a phase
    effective, settings  source of the settings and their names: see `launched_output`
    watch                table or null: see `model_watch`
    plan                 extent of the run
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import model_watch, processes, protocol
from .abandoned_builds import release_abandoned_builds
from .launched_output import Figure, LaunchedSettings, MetricReader, line_source
from .phase_recorder import out_of_reach
from .protocol import Request, Result

COMMAND_POLL_S = 0.05
COMMAND_GRACE_SECONDS = 5.0  # time between SIGTERM and SIGKILL
OUT = "{autotune_run_folder}"
EXCERPT_LINES = 3
LINE_CHARACTERS = 80
MAX_LINE_BYTES = 2**20
DEFAULT_CYCLE_SPREAD = 0.05


class CommandFailed(RuntimeError):
    """The command failed. `ended` has its signal or exit code, the message its last output."""

    def __init__(self, text: str, ended: Mapping[str, int | None]) -> None:
        super().__init__(text)
        self.ended = dict(ended)


class NoFigures(RuntimeError):
    """The command succeeded without reporting its speed."""


def warm(load: Request) -> dict[str, str]:
    """Return Python's version. The command does its own imports."""
    return {"python": platform.python_version()}


def load(request: Request, recorder: Any) -> Result:
    recorder.begin()
    processes.adopt_orphans()
    scratch = request.get("scratch") or tempfile.gettempdir()
    return {"scratch": str(scratch)}


def release(loaded: Any) -> None:
    """Do nothing: `_end` leaves no process behind."""


def measure(
    loaded: Request,
    request: Request,
    recorder: Any,
) -> Result:
    recorder.begin()
    run_folder = tempfile.mkdtemp(prefix="run-", dir=loaded["scratch"])
    folder = Path(run_folder)
    run = _LaunchedRun(request, recorder, folder)
    try:
        run.go()
        return {**run.result(), "memory": {}}
    except BaseException as error:
        no_memory: Result = {"peak_bytes": None, "phase_peak_bytes": {}}
        error.partial = {**run.result(), "memory": no_memory}  # type: ignore[attr-defined]
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _LaunchedRun:
    """Run of one command, until it ends or has enough cycles."""

    def __init__(
        self,
        request: Request,
        recorder: Any,
        folder: Path,
    ) -> None:
        self._request = request
        self._recorder = recorder
        self._folder = folder
        self._plan: Request = request["plan"]
        # Records left out of the timing: the first has the first step, with all one-time work.
        warmup_cycles = int(self._plan["warmup_cycles"])
        self._warmup = max(1, warmup_cycles)
        self._metrics = MetricReader(request["figures"])
        self._new_lines = line_source(request["figures"], folder)
        effective = request.get("effective")
        self._settings = LaunchedSettings(effective, self._resolved)
        self._phases: list[tuple[re.Pattern[str], str | None]] = []
        for pattern, phase in request.get("phases") or ():
            self._phases.append((re.compile(pattern), phase))

        self._lock = threading.Lock()  # of the printed lines
        self._printed: list[str] = []
        self._last_lines: list[str] = []
        self._timed: list[Figure] = []
        self._is_enough = self._is_cut_short = False
        self._effective: Result = {}
        self._began = time.perf_counter()

    def go(self) -> None:
        # 1. Start.
        files = self._request.get("files") or {}
        for name, text in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        process = self._start()
        echo = threading.Thread(
            target=self._pump,
            args=(process,),
            daemon=True,
        )
        echo.start()
        # 2. Wait for enough cycles, or for the end.
        try:
            while not self._is_enough and process.poll() is None:
                self._read_output()
                time.sleep(COMMAND_POLL_S)
        finally:
            ended_itself = process.poll() is not None and not self._is_enough
            _end(process)
            echo.join(timeout=COMMAND_GRACE_SECONDS)
        self._read_output()
        names = self._request.get("settings") or ()
        self._effective = self._settings.reported_values(names)
        # 3. Judge a command that ended by itself.
        if ended_itself and process.returncode:
            raise self._failure(process.returncode)
        if ended_itself and not self._timed:
            raise self._no_figures()

    def _failure(self, code: int) -> CommandFailed:
        lines = [line for line in self._last_lines if line.strip()]
        text = " | ".join(lines)
        ended = {"signal": None, "exit": code}
        if code < 0:
            ended = {"signal": -code, "exit": None}
        return CommandFailed(text or "it printed nothing", ended)

    def _no_figures(self) -> NoFigures:
        source = self._request["figures"].get("file") or "its output"
        return NoFigures(
            f"the command ended well, but {self._metrics.records} records with a speed were"
            f" found in {source}; at least two are needed, the first being warm-up. Its last"
            f" lines: {' | '.join(self._last_lines) or 'none'}"
        )

    # The process.

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [self._resolved(word) for word in self._request["argv"]]
        environment = self._environment()
        release_abandoned_builds(environment)
        try:
            return subprocess.Popen(
                argv,
                cwd=self._request.get("folder"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            reason = error.strerror or error
            raise CommandFailed(
                f"{argv[0]} can't be started: {reason}", {"signal": None, "exit": 127}
            ) from error

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        variables = self._request.get("environment") or {}
        for name, value in variables.items():
            environment[name] = self._resolved(value)
        environment |= model_watch.environment(
            self._request.get("watch"), self._folder, environment
        )
        for name in ("RANK", "LOCAL_RANK"):  # of this process
            environment.pop(name, None)
        return environment

    def _resolved(self, text: str) -> str:
        return text.replace(OUT, str(self._folder))

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        """Copy the command's output to the probe's log, and collect its lines."""
        assert process.stdout is not None
        # A line without an end arrives in pieces: it must not fill the memory that is measured.
        read_line = partial(process.stdout.readline, MAX_LINE_BYTES)
        for line in iter(read_line, b""):
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            text = line.decode(errors="replace")
            with self._lock:
                self._printed.append(text.rstrip("\n"))

    # Its output.

    def _read_output(self) -> None:
        with self._lock:
            printed, self._printed = self._printed, []
        lines = [*self._last_lines, *printed]
        self._last_lines = lines[-EXCERPT_LINES:]
        if printed:
            excerpt = printed[-1].strip()[:LINE_CHARACTERS]
            self._recorder.report_progress(f"it printed {excerpt!r}")
        for line in printed:
            self._change_phase(line)
            self._settings.read_line(line)
        for line in self._new_lines(printed):
            figure = self._metrics.read(line, time.perf_counter())
            is_warm = self._metrics.records > self._warmup
            is_timed = is_warm and not self._is_enough
            if figure is not None and is_timed:
                self._add(figure)

    def _change_phase(self, line: str) -> None:
        for pattern, phase in self._phases:
            if pattern.search(line):
                self._recorder.leave()
                if phase:
                    self._recorder.enter(phase)

    def _add(self, figure: Figure) -> None:
        """Add a timed cycle, and decide whether there are enough."""
        self._timed.append(figure)
        min_steps = int(self._plan["optimizer_steps"])
        timed_cycles = int(self._plan["timed_cycles"])
        min_timed = max(1, timed_cycles, min_steps - self._warmup)
        done = len(self._timed) + self._warmup
        self._recorder.emit(
            {
                "event": protocol.CYCLE,
                "done": done,
                "of": min_timed + self._warmup,
                "seconds": figure.seconds,
                "tokens": figure.tokens,
            }
        )
        soak_seconds = self._plan.get("soak_seconds")
        goal = self._plan.get("stop_below_tokens_per_second")
        if soak_seconds:
            seconds = time.perf_counter() - self._began
            self._is_enough = seconds >= float(soak_seconds)
        elif len(self._timed) >= min_timed:
            self._is_enough = True
        elif done >= min_steps and goal is not None:
            spread = float(self._plan.get("cycle_spread") or DEFAULT_CYCLE_SPREAD)
            rates = [timed.tokens / timed.seconds for timed in self._timed]
            self._is_cut_short = out_of_reach(rates, goal=float(goal), spread=spread)
            self._is_enough = self._is_cut_short

    def result(self) -> Result:
        run_seconds = time.perf_counter() - self._began
        cycle_seconds = [figure.seconds for figure in self._timed]
        cycle_tokens = [figure.tokens for figure in self._timed]
        timed_seconds = sum(cycle_seconds)
        speed = {
            "completion_tokens": max(cycle_tokens, default=0),
            "cycle_seconds": cycle_seconds,
            "cycle_loss_tokens": cycle_tokens,
            "prompt_tokens": 0,
            "phase_seconds": {"other": timed_seconds},
            "user_reward_seconds": 0.0,
            "cut_short": self._is_cut_short,
            "borrowed_seconds": 0.0,
        }
        return {
            "worst": speed if self._timed else None,
            "typical": None,
            "optimizer_steps": self._metrics.records,
            "effective": self._effective,
            "exercised": {
                "watched": "outside",
                "optimizer_steps": self._metrics.records,
                "seconds": timed_seconds,
            },
            "setup_seconds": max(0.0, run_seconds - timed_seconds),
            "loop_seconds": timed_seconds,
            "models": model_watch.read_ranks(self._folder),
            "world_size": None,
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and all processes below it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + COMMAND_GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(COMMAND_POLL_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    processes.end_descendants()
    process.poll()
