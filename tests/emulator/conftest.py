"""CUDA environments: a test that takes `python` runs once for each that is named, and is skipped
without any.
"""

from __future__ import annotations

import pytest

from tests.emulator.on_cards import VARIABLE, interpreters

NONE = pytest.param(
    "", marks=pytest.mark.skip(reason=f"{VARIABLE} names no environment with a CUDA build of torch")
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", interpreters() or [NONE])
