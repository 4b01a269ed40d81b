"""What holds for every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_test_knows_the_users_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are kept in the user's data folder; a test has one of its own, and starts knowing nothing."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
