from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from autotune.core import installation

CLONE = Path(__file__).resolve().parents[2]


def test_an_extra_is_installed_from_the_clone() -> None:
    assert installation.pip_requirement("ray") == f"'{CLONE}[ray]'"


def test_without_a_clone_the_recorded_source_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Recorded:
        def __init__(self, text: str | None) -> None:
            self.text = text

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.text

    monkeypatch.setattr(installation, "__file__", str(tmp_path / "lib/autotune/core/x.py"))
    sources = {
        '{"url": "file:///home/me/my%20clone"}': "'/home/me/my clone[ray]'",
        '{"url": "git+https://host/autotune.git"}': "'git+https://host/autotune.git[ray]'",
        None: "'grpo-autotune[ray]'",
    }
    for text, requirement in sources.items():
        monkeypatch.setattr("importlib.metadata.distribution", lambda name, t=text: Recorded(t))
        assert installation.pip_requirement("ray") == requirement


def test_the_distributions_name_is_that_of_pyproject() -> None:
    project = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]
    assert project["name"] == installation.DISTRIBUTION
