"""A framework of another version than was read is refused before anything runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from autotune.core.errors import TrainingEnvironmentError
from autotune.request.resources import refuse_other_versions

HERE = Path(sys.executable)


def test_another_version_is_refused_with_the_line_for_pip() -> None:
    with pytest.raises(
        TrainingEnvironmentError, match=r"verl needs click<1, .* has click .* pip install 'click<1'"
    ):
        refuse_other_versions(HERE, "--framework verl", ["click<1"])


def test_a_version_in_the_range_is_taken_and_a_repository_names_none() -> None:
    refuse_other_versions(
        HERE,
        "--framework verl",
        [f"click>={version('click')}", "git+https://github.com/somebody/something"],
    )
