"""The machine of a benchmark is described without git as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import facts


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    described = facts({"torch": "2.11.0"})
    assert described["commit"] == "unknown"
    assert described["versions"] == {"torch": "2.11.0"}
