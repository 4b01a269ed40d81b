"""The real program, in a process of its own."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fork_server import ForkServer

TINY_CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}

PROGRAM = [sys.executable, "-m", "autotune"]
OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG")
"""Beginnings of the variables that an interpreter reads when it starts."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Result of a call of the program."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its stdout as the one JSON document that it must be."""
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """Ours, offline, with an empty hub cache unless one is given."""
    base = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_CACHE": "/nonexistent",
        "COLUMNS": "200",
    }
    return {**os.environ, **base, **changes}


def bound_by_permissions() -> list[str]:
    """Return the words before a program that may not read and write everything, also as root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read and write everything, and there is no setpriv")
    capabilities = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]


def autotune(
    *arguments: str,
    cwd: Path,
    timeout: float = 60,
    launcher: Sequence[str] = (),
    **variables: str,
) -> Done:
    if launcher or any(name.startswith(OF_THE_INTERPRETER) for name in variables):
        done = subprocess.run(
            [*launcher, *PROGRAM, *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout,
            env=environment(**variables),
        )
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)
    return _forked(arguments, cwd=cwd, timeout=timeout, variables=variables)


def _forked(
    arguments: Sequence[str],
    *,
    cwd: Path,
    timeout: float,
    variables: Mapping[str, str],
) -> Done:
    """Run the program in a process that has imported it already."""
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        code = _fork_server(os.environ.get("PYTHONPATH")).call(
            arguments,
            cwd=cwd,
            environment=environment(**variables),
            streams=(nothing, out, err),
            timeout=timeout,
        )
        for stream in (out, err):
            stream.seek(0)
        return Done(code=code, out=out.read(), err=err.read())


@functools.cache
def _fork_server(python_path: str | None) -> ForkServer:
    """Return the server of this PYTHONPATH, which decides what its processes find."""
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    server = ForkServer(folder)
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.close)  # before its folder goes
    return server


def shape_only(folder: Path, **config: object) -> Path:
    """Create a model folder with a config only: sufficient for requests without measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **config}))
    return folder
