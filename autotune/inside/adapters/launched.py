"""Any training command, as it is: started, read along, and ended once enough was seen. What it needs is measured from outside,
and what its models hold in its own processes, where it is known who keeps them.

The request of a measure:

    {"argv": [...], "environment": {...}, "files": {"name": "text"},      `{out}` in all of them is a folder of this probe's own
     "folder": "where it is started" | null,
     "figures": {...},                                                     see `figures`
     "phases": [[regex, phase | null], ...],                               a printed line that says which phase begins
     "effective": {...} | null,  "settings": ["name", ...],                where it says what it took them to be: see `settings`
     "watch": {...} | null,                                                where its models can be seen: see `watched`
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

from .. import processes, watched
from ..figures import Figure, Reader, listener
from ..reach import out_of_reach
from ..settings import Settings

LOOK_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""Between the request to end and the end."""

OUT = "{out}"
SHOWN_LINES = 3
SHOWN_CHARACTERS = 80


class CommandFailed(RuntimeError):
    """The command ended badly. `ended` is how, for who reads its last words."""

    def __init__(self, words: str, ended: Mapping[str, int | None]) -> None:
        super().__init__(words)
        self.ended = dict(ended)


class NoFigures(RuntimeError):
    """The command ended well, and nothing was found that tells its speed."""


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Nothing to import: the command does that itself."""
    return {"python": platform.python_version()}


def load(request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    stage.begin()
    processes.adopt_orphans()
    return {"scratch": str(request.get("scratch") or tempfile.gettempdir())}


def release(loaded: Any) -> None:
    """Nothing stays behind: see `_end`."""


def measure(loaded: Mapping[str, Any], request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    stage.begin()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=loaded["scratch"]))
    run = _Run(request, stage, folder)
    try:
        run.go()
        return {**run.found(), "memory": {}}
    except BaseException as error:
        error.partial = {**run.found(), "memory": {"peak_bytes": None, "phase_peak_bytes": {}}}  # type: ignore[attr-defined]
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    """One command, from its start to its end."""

    def __init__(self, request: Mapping[str, Any], stage: Any, folder: Path) -> None:
        self._request, self._stage, self._folder = request, stage, folder
        self._plan: Mapping[str, Any] = request["plan"]
        self._reader = Reader(request["figures"])
        self._phases = [(re.compile(pattern), phase) for pattern, phase in request.get("phases") or ()]
        self._printed: list[str] = []
        self._last: list[str] = []
        self._lock = threading.Lock()
        self._timed: list[Figure] = []
        self._enough = self._cut_short = False
        self._settings = Settings(request.get("effective"), self._placed)
        self._effective: dict[str, Any] = {}
        self._began = time.perf_counter()

    def go(self) -> None:
        for name, text in (self._request.get("files") or {}).items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._placed(text), encoding="utf-8")
        listen = listener(self._request["figures"], self._folder)
        process = self._start()
        echo = threading.Thread(target=self._pump, args=(process,), daemon=True)
        echo.start()
        try:
            while not self._enough and process.poll() is None:
                self._look(listen)
                time.sleep(LOOK_SECONDS)
        finally:
            ended_itself = process.poll() is not None and not self._enough
            _end(process)
            echo.join(timeout=GRACE_SECONDS)
        self._look(listen)
        self._effective = self._settings.found(self._request.get("settings") or ())
        if ended_itself:
            self._judge(process.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [self._placed(word) for word in self._request["argv"]]
        extra = {name: self._placed(value) for name, value in (self._request.get("environment") or {}).items()}
        extra |= watched.environment(self._request.get("watch"), self._folder, {**os.environ, **extra})
        environment = {name: value for name, value in {**os.environ, **extra}.items() if name not in ("RANK", "LOCAL_RANK")}
        try:
            return subprocess.Popen(
                argv, cwd=self._request.get("folder"), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CommandFailed(
                f"{argv[0]} can't be started: {error.strerror or error}", {"signal": None, "exit": 127}
            ) from error

    def _placed(self, text: str) -> str:
        return text.replace(OUT, str(self._folder))

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        """What the command prints goes on to the rig's log, and its lines to whoever looks for figures."""
        assert process.stdout is not None
        for raw in process.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.flush()
            with self._lock:
                self._printed.append(raw.decode(errors="replace").rstrip("\n"))

    def _look(self, listen: Any) -> None:
        with self._lock:
            printed, self._printed = self._printed, []
        self._last = [*self._last, *printed][-SHOWN_LINES:]
        if printed:
            self._stage.moves(f"it printed {printed[-1].strip()[:SHOWN_CHARACTERS]!r}")
        for line in printed:
            self._enter(line)
            self._settings.hear(line)
        for line in listen(printed):
            figure = self._reader.read(line, time.perf_counter())
            if self._reader.records > self._warmup and figure is not None and not self._enough:
                self._take(figure)

    def _enter(self, line: str) -> None:
        for pattern, phase in self._phases:
            if pattern.search(line):
                self._stage.leave()
                if phase:
                    self._stage.enter(phase)

    @property
    def _warmup(self) -> int:
        """Records left out: the first holds the first step, with all that happens once."""
        return max(1, int(self._plan["warmup_cycles"]))

    def _take(self, figure: Figure) -> None:
        self._timed.append(figure)
        wanted = max(1, int(self._plan["timed_cycles"]), int(self._plan["optimizer_steps"]) - self._warmup)
        done, tokens = len(self._timed) + self._warmup, figure.tokens
        self._stage.emit(
            {"event": "cycle", "done": done, "of": wanted + self._warmup, "seconds": figure.seconds, "tokens": tokens}
        )
        soak = self._plan.get("soak_seconds")
        if soak:
            self._enough = time.perf_counter() - self._began >= float(soak)
        elif len(self._timed) >= wanted:
            self._enough = True
        elif done >= int(self._plan["optimizer_steps"]) and self._is_hopeless():
            self._enough = self._cut_short = True

    def _is_hopeless(self) -> bool:
        goal = self._plan.get("stop_below_tokens_per_second")
        rates = [figure.tokens / figure.seconds for figure in self._timed]
        return goal is not None and out_of_reach(rates, goal=float(goal), spread=float(self._plan.get("cycle_spread") or 0.05))

    def _judge(self, code: int) -> None:
        """It ended before enough was seen. One that ended well had no more to do."""
        if code:
            how = {"signal": -code, "exit": None} if code < 0 else {"signal": None, "exit": code}
            raise CommandFailed(" | ".join(line for line in self._last if line.strip()) or "it said nothing", how)
        if not self._timed:
            where = self._request["figures"].get("file") or "what it printed"
            said = " | ".join(self._last) or "nothing"
            raise NoFigures(
                f"the command ended well, and {self._reader.records} records with a speed were found in {where} (two at least "
                f"are needed: the first is warm-up). Its last words: {said}"
            )

    def found(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        spent = sum(figure.seconds for figure in self._timed)
        speed = {
            "completion_tokens": max((figure.tokens for figure in self._timed), default=0),
            "cycle_seconds": [figure.seconds for figure in self._timed],
            "cycle_loss_tokens": [figure.tokens for figure in self._timed],
            "prompt_tokens": 0,
            "phase_seconds": {"other": spent},
            "user_reward_seconds": 0.0,
            "cut_short": self._cut_short,
            "borrowed_seconds": 0.0,
        }
        return {
            "worst": speed if self._timed else None,
            "typical": None,
            "optimizer_steps": self._reader.records,
            "effective": self._effective,
            "exercised": {"watched": "outside", "optimizer_steps": self._reader.records, "seconds": spent},
            "setup_seconds": max(0.0, seconds - spent),
            "loop_seconds": spent,
            "models": watched.found(self._folder),
            "world_size": None,
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command with everything below it, wherever that has gone."""
    group = process.pid
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    processes.end_descendants()
    process.poll()
