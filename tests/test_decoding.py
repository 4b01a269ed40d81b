"""What several threads read is known before any of them is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEARNING = """
import importlib, sys
import msgspec
module, name = sys.argv[1:]
kind = getattr(importlib.import_module(module), name)
called = []
sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
try:
    msgspec.json.decode(b"[]", type=kind)
except msgspec.ValidationError:
    pass
sys.setprofile(None)
print("learns now" if "get_class_annotations" in called else "known")
"""
"""The first decoding of a class asks Python for its annotations: it is then that a second thread finds it half known."""


def _first_decoding(module: str, name: str) -> str:
    run = subprocess.run([sys.executable, "-c", LEARNING, module, name], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("autotune.executors.node", "Reply"),
        ("autotune.executors.node", "Ordered"),
        ("autotune.executors.node", "Seating"),
        ("autotune.executors.cluster", "Node"),
        ("autotune.rig.heard", "_Heard"),
        ("autotune.rig.tracer", "Trace"),
    ],
)
def test_what_threads_decode_is_known_on_import(module: str, name: str) -> None:
    assert _first_decoding(module, name) == "known"


def test_what_nobody_made_known_is_learnt_at_the_first_decoding() -> None:
    assert _first_decoding("autotune.trainers.rows", "RowLengths") == "learns now"
