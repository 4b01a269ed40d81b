"""Starts the guard with the plain training of `child.py`, as a shell would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.probe.spawn import MARK_VARIABLE, marked
from tests.guard.child import state_at_the_end

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
SECONDS = 200.0


class GuardedRun:
    """One guard as a process, with its folder and everything below it."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.command = [
            *(sys.executable, "-m", "autotune", "guard", "--out", str(folder / "guard")),
            *("--values", "micro=8,4,2", "--checkpoints", str(folder / "out" / "step_{step}")),
            *options,
            *("--", *self.training()),
        ]
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            MARK_VARIABLE: self.mark,
            **environment,
        }
        self.process = self._start()

    def training(self) -> list[str]:
        """Return the guarded command."""
        return [sys.executable, str(CHILD), str(self.folder), "{micro}", "{checkpoint}"]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def resume(self, **environment: str) -> GuardedRun:
        """Start the same guard again, as a scheduler does."""
        self.environment |= environment
        place = self.command.index("--")
        if "--resume" not in self.command:
            self.command.insert(place, "--resume")
        self.process = self._start()
        return self

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what the guard said."""
        _, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stderr

    def pids(self, word: str) -> list[int]:
        """Return the processes whose command line begins a program named by this word."""
        available = []
        for pid in marked(self.mark):
            if word in _command_of(pid):
                available.append(pid)
        return available

    def child(self) -> int:
        """Return the training's process, once it is there."""
        return self._one(str(CHILD), without=("autotune", "keep"))

    def keeper(self) -> int:
        return self._one("keep", without=())

    def _one(self, word: str, without: tuple[str, ...]) -> int:
        for _ in self._until(30.0):
            for pid in self.pids(word):
                command_words = _command_of(pid).split("\0")
                if command_words[2:3] != ["autotune"] and not (set(without) & set(command_words)):
                    return pid
        raise AssertionError(f"no process {word}")

    def wait_for(self, path: str) -> Path:
        """Wait until a file of the run is there."""
        for _ in self._until(60.0):
            if (self.folder / path).exists():
                return self.folder / path
        raise AssertionError(f"no {path}: {self.process.poll()}")

    def wait_until_gone(self) -> None:
        """Assert that no process of the run is left."""
        remaining: list[int] = []
        for _ in self._until(15.0):
            remaining = marked(self.mark)
            if not remaining:
                return
        raise AssertionError([_command_of(pid) for pid in remaining])

    @staticmethod
    def _until(seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            time.sleep(0.01)

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / "guard" / "guard.json").read_text())
        return document

    @property
    def attempts(self) -> list[list[str]]:
        """Return the arguments of each start: the micro-batch, and the checkpoint."""
        files = sorted((self.folder / "attempts").iterdir(), key=lambda file: int(file.name))
        return [file.read_text().split() for file in files]

    def assert_complete(self) -> None:
        """Assert that each sample was seen once, in order."""
        assert (self.folder / "final").read_text() == state_at_the_end()


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""
