"""The real program, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
    done = subprocess.run(
        [*launcher, *PROGRAM, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env=environment(**variables),
    )
    return Done(
        code=done.returncode,
        out=done.stdout,
        err=done.stderr,
    )


def shape_only(folder: Path, **config: object) -> Path:
    """Create a model folder with a config only: sufficient for requests without measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **config}))
    return folder
