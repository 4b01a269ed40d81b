"""Imports without the garbage collector leave it, and the lookup of packages, as they were."""

from __future__ import annotations

import gc
import importlib.metadata

import pytest

from autotune.worker.library_imports import kept_imports


def test_nothing_is_collected_and_packages_are_looked_through_once() -> None:
    lookup = importlib.metadata.packages_distributions
    with kept_imports():
        assert not gc.isenabled()
        first, second = (importlib.metadata.packages_distributions() for _ in range(2))
    assert first is second and "pytest" in first["_pytest"]
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is lookup


def test_an_import_that_fails_leaves_them_too() -> None:
    lookup = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), kept_imports():
        raise ImportError("no such library")
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is lookup
