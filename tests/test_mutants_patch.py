"""A mutant in a loaded process: every function of the file is the changed one afterwards."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants import patch
from tests.mutants.processes import in_fork
from tests.mutants.sites import mutants_of

TEXT = """
import functools


def plain(a: int) -> int:
    return a + 1


@functools.cache
def cached(a: int) -> int:
    return a + 2


class Holder:
    def method(self, a: int) -> int:
        return sum(b + 3 for b in (a,))

    @property
    def shown(self) -> int:
        def inner(a: int) -> int:
            return a + 4

        return inner(10)
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    file = tmp_path / "patched_module.py"
    file.write_text(TEXT)
    specification = importlib.util.spec_from_file_location("patched_module", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_functions_methods_caches_and_inner_functions_are_changed(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [module.plain, module.cached, module.Holder]
    sums = [
        mutant
        for mutant in mutants_of(tmp_path / "patched_module.py", tmp_path)
        if mutant.kind == "operator"
    ]
    assert len(sums) == 4
    functions = patch.loaded_functions(tmp_path)
    for mutant in sums:  # one after the other, each in the text as it was
        patch.apply(mutant, TEXT, functions)
        results = [module.plain(10), module.cached(10), module.Holder().method(10)]
        results.append(module.Holder().shown)
        module.cached.cache_clear()
        changed = sums.index(mutant)
        expected = [11, 12, 13, 14]
        expected[changed] = [9, 8, 7, 6][changed]
        assert results == expected
        for function in (entry for entries in functions.values() for entry in entries):
            function.__code__ = _original(function.__code__.co_qualname, tmp_path)
    assert before == [module.plain, module.cached, module.Holder]


def _original(name: str, folder: Path) -> patch.CodeType:
    codes = [compile(TEXT, str(folder / "patched_module.py"), "exec")]
    for code in codes:
        if code.co_qualname == name:
            return code
        codes += [part for part in code.co_consts if isinstance(part, patch.CodeType)]
    raise LookupError(name)


def test_a_fork_has_an_exit_status_and_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_fork(lambda: None, 60) == 0
    assert in_fork(lambda: os._exit(2), 60) == 2
    assert in_fork(lambda: 1 / 0 and None, 60) == 1
    (failure,) = tmp_path.glob(".failed-*")
    assert "ZeroDivisionError" in failure.read_text()
    assert in_fork(lambda: time.sleep(600), 0.2) is None
