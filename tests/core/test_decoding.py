"""Message types for several threads are registered at import."""

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
"""The first decoding of a class evaluates its annotations; meanwhile another thread finds it incomplete."""


def _first_decoding(module: str, name: str) -> str:
    run = subprocess.run([sys.executable, "-c", LEARNING, module, name], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("autotune.probe.executors.ray_node", "NodeReply"),
        ("autotune.probe.executors.ray_node", "ProbeOrder"),
        ("autotune.probe.executors.ray_node", "SlotSettings"),
        ("autotune.probe.executors.ray_node", "Node"),
        ("autotune.probe.message_validation", "_Received"),
        ("autotune.prediction.tracer", "Trace"),
    ],
)
def test_types_for_threads_are_registered_on_import(module: str, name: str) -> None:
    assert _first_decoding(module, name) == "known"


def test_an_unregistered_type_is_inspected_at_the_first_decoding() -> None:
    assert _first_decoding("autotune.core.dataset", "RowLengths") == "learns now"
