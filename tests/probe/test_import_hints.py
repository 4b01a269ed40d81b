"""What a training environment lacks, and the command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.prediction.trace_cache import key_of
from autotune.probe.spawn import import_hints

PYTHON = Path("/env/bin/python")
SUPPORTED = {"trl": ("1.12", "1.17"), "vllm": ("0.20", "0.32")}


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("No module named 'msgspec'", "/env/bin/python -m pip install msgspec"),
        ("No module named 'zmq.asyncio'", "/env/bin/python -m pip install zmq"),
    ],
)
def test_a_dependency_that_is_missing_is_the_one_to_install(text: str, command: str) -> None:
    (hint,) = import_hints(PYTHON, {"type": "ModuleNotFoundError", "text": text}, SUPPORTED)
    assert command in hint
    assert "trl" not in hint


@pytest.mark.parametrize("text", ["No module named 'trl'", "undefined symbol: cudaGetDevice"])
def test_otherwise_supported_versions_are(text: str) -> None:
    hints = import_hints(PYTHON, {"type": "ImportError", "text": text}, SUPPORTED)
    assert ["'trl>=1.12,<1.17'" in hints[0], "'vllm>=0.20,<0.32'" in hints[1]] == [True, True]


def test_a_patch_of_python_keeps_traces() -> None:
    keys = {}
    for python in ("3.11.7", "3.11.14", "3.12.1"):
        keys[python] = key_of({"steps": 1}, {"python": python, "torch": "2.13.0"}, "trl")
    assert keys["3.11.7"] == keys["3.11.14"]
    assert keys["3.11.7"] != keys["3.12.1"]
