"""Adapter for any training command: starts it, reads its output, ends it after enough cycles.

Memory is measured from outside, and the models inside the command's own processes where `watch` has
a table. The request of a measure:

    {"argv": [...], "environment": {...}, "files": {"name": "text"},      OUT in the first two: a folder of this probe
     "folder": working directory | null,
     "figures": {...},                                                     see `launched_output`
     "phases": [[regex, phase | null], ...],                               printed lines that start a phase
     "effective": {...} | null,  "settings": ["name", ...],                see `launched_output`
     "watch": {...} | null,                                                see `model_watch`
     "plan": {...}}
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
from pathlib import Path
from typing import Any

from . import model_watch, processes, protocol
from .launched_output import Figure, LaunchedSettings, MetricReader, line_source
from .phase_recorder import out_of_reach

POLL_INTERVAL_S = 0.05
GRACE_SECONDS = 5.0  # time between SIGTERM and SIGKILL
OUT = "{autotune_run_folder}"
EXCERPT_LINES = 3
EXCERPT_CHARACTERS = 80
DEFAULT_CYCLE_SPREAD = 0.05


class CommandFailed(RuntimeError):
    """The command failed. `ended` has its signal or exit code, the message its last output."""

    def __init__(self, text: str, ended: Mapping[str, int | None]) -> None:
        super().__init__(text)
        self.ended = dict(ended)


class NoFigures(RuntimeError):
    """The command succeeded without reporting its speed."""


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Return Python's version. The command does its own imports."""
    return {"python": platform.python_version()}


def load(request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    recorder.begin()
    processes.adopt_orphans()
    return {"scratch": str(request.get("scratch") or tempfile.gettempdir())}


def release(loaded: Any) -> None:
    """Do nothing: `_end` leaves no process behind."""


def measure(loaded: Mapping[str, Any], request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    recorder.begin()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=loaded["scratch"]))
    run = _LaunchedRun(request, recorder, folder)
    try:
        run.go()
        return {**run.found(), "memory": {}}
    except BaseException as error:
        error.partial = {**run.found(), "memory": {"peak_bytes": None, "phase_peak_bytes": {}}}  # type: ignore[attr-defined]
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _LaunchedRun:
    def __init__(self, request: Mapping[str, Any], recorder: Any, folder: Path) -> None:
        self._request, self._recorder, self._folder = request, recorder, folder
        self._plan: Mapping[str, Any] = request["plan"]
        self._metrics = MetricReader(request["figures"])
        self._new_lines = line_source(request["figures"], folder)
        self._phases = [
            (re.compile(pattern), phase) for pattern, phase in request.get("phases") or ()
        ]
        self._printed: list[str] = []
        self._last_lines: list[str] = []
        self._lock = threading.Lock()
        self._timed: list[Figure] = []
        self._enough = self._cut_short = False
        self._settings = LaunchedSettings(request.get("effective"), self._resolved)
        self._effective: dict[str, Any] = {}
        self._began = time.perf_counter()
        # Records left out of the timing: the first has the first step, with all one-time work.
        self._warmup = max(1, int(self._plan["warmup_cycles"]))

    def go(self) -> None:
        for name, text in (self._request.get("files") or {}).items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        process = self._start()
        echo = threading.Thread(target=self._pump, args=(process,), daemon=True)
        echo.start()
        try:
            while not self._enough and process.poll() is None:
                self._read_output()
                time.sleep(POLL_INTERVAL_S)
        finally:
            ended_itself = process.poll() is not None and not self._enough
            _end(process)
            echo.join(timeout=GRACE_SECONDS)
        self._read_output()
        self._effective = self._settings.found(self._request.get("settings") or ())
        code = process.returncode
        if ended_itself and code:
            ended = {"signal": -code, "exit": None} if code < 0 else {"signal": None, "exit": code}
            raise CommandFailed(
                " | ".join(line for line in self._last_lines if line.strip())
                or "it printed nothing",
                ended,
            )
        if ended_itself and not self._timed:
            source = self._request["figures"].get("file") or "its output"
            raise NoFigures(
                f"the command ended well, but {self._metrics.records} records with a speed were"
                f" found in {source}; at least two are needed, the first being warm-up. Its last"
                f" lines: {' | '.join(self._last_lines) or 'none'}"
            )

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [self._resolved(word) for word in self._request["argv"]]
        extra = {
            name: self._resolved(value)
            for name, value in (self._request.get("environment") or {}).items()
        }
        extra |= model_watch.environment(
            self._request.get("watch"), self._folder, {**os.environ, **extra}
        )
        environment = {
            name: value
            for name, value in {**os.environ, **extra}.items()
            if name not in ("RANK", "LOCAL_RANK")
        }
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

    def _resolved(self, text: str) -> str:
        return text.replace(OUT, str(self._folder))

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        """Copy the command's output to the probe's log, and collect its lines."""
        assert process.stdout is not None
        for raw in process.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.flush()
            with self._lock:
                self._printed.append(raw.decode(errors="replace").rstrip("\n"))

    def _read_output(self) -> None:
        with self._lock:
            printed, self._printed = self._printed, []
        self._last_lines = [*self._last_lines, *printed][-EXCERPT_LINES:]
        if printed:
            self._recorder.report_progress(
                f"it printed {printed[-1].strip()[:EXCERPT_CHARACTERS]!r}"
            )
        for line in printed:
            for pattern, phase in self._phases:
                if pattern.search(line):
                    self._recorder.leave()
                    if phase:
                        self._recorder.enter(phase)
            self._settings.read_line(line)
        for line in self._new_lines(printed):
            figure = self._metrics.read(line, time.perf_counter())
            if self._metrics.records > self._warmup and figure is not None and not self._enough:
                self._add(figure)

    def _add(self, figure: Figure) -> None:
        self._timed.append(figure)
        needed = max(
            1, int(self._plan["timed_cycles"]), int(self._plan["optimizer_steps"]) - self._warmup
        )
        done = len(self._timed) + self._warmup
        cycle = {
            "done": done,
            "of": needed + self._warmup,
            "seconds": figure.seconds,
            "tokens": figure.tokens,
        }
        self._recorder.emit({"event": protocol.CYCLE, **cycle})
        soak, goal = self._plan.get("soak_seconds"), self._plan.get("stop_below_tokens_per_second")
        if soak:
            self._enough = time.perf_counter() - self._began >= float(soak)
        elif len(self._timed) >= needed:
            self._enough = True
        elif done >= int(self._plan["optimizer_steps"]) and goal is not None:
            spread = float(self._plan.get("cycle_spread") or DEFAULT_CYCLE_SPREAD)
            rates = [figure.tokens / figure.seconds for figure in self._timed]
            self._enough = self._cut_short = out_of_reach(rates, goal=float(goal), spread=spread)

    def found(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        timed = sum(figure.seconds for figure in self._timed)
        speed = {
            "completion_tokens": max((figure.tokens for figure in self._timed), default=0),
            "cycle_seconds": [figure.seconds for figure in self._timed],
            "cycle_loss_tokens": [figure.tokens for figure in self._timed],
            "prompt_tokens": 0,
            "phase_seconds": {"other": timed},
            "user_reward_seconds": 0.0,
            "cut_short": self._cut_short,
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
                "seconds": timed,
            },
            "setup_seconds": max(0.0, seconds - timed),
            "loop_seconds": timed,
            "models": model_watch.read_ranks(self._folder),
            "world_size": None,
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and all processes below it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    processes.end_descendants()
    process.poll()
