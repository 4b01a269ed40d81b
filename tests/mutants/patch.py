"""A mutant in a process that has the module loaded already: its functions get the changed code.

A class or a function keeps its identity, so nothing has to be imported again: a mutant costs
milliseconds, not the seconds of an import.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.mutants.sites import Mutant

Place = tuple[str, str, int]  # of a function: file, qualified name, first line
Functions = Mapping[Place, list[FunctionType]]


def loaded_functions(folder: Path) -> Functions:
    """Return the functions that are loaded from a folder, by their place."""
    functions: dict[Place, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if not isinstance(thing, FunctionType):
            continue
        if _is_from(folder, thing.__code__):
            functions[_place(thing.__code__)].append(thing)
    return functions


def compiled_functions(folder: Path) -> list[Any]:
    """Return numba's functions that are loaded from a folder."""
    if "numba" not in sys.modules:
        return []
    from numba.core.dispatcher import Dispatcher

    compiled = []
    for thing in gc.get_objects():
        if isinstance(thing, Dispatcher) and _is_from(folder, thing.py_func.__code__):
            compiled.append(thing)
    return compiled


def forget_compiled(file: str, functions: Iterable[Any]) -> None:
    """Let numba compile the functions of a changed file anew: what it stored is of the file before
    the change.
    """
    for function in functions:
        if function.py_func.__code__.co_filename.endswith(file):
            from numba.core.caching import NullCache

            function._cache = NullCache()


def apply(
    mutant: Mutant,
    text: str,
    functions: Functions,
) -> None:
    """Change the loaded functions of the mutant's file to what its changed text says."""
    file = str(Path(mutant.file).resolve())
    original = compile(text, file, "exec")
    changed = compile(mutant.applied_to(text), file, "exec")
    for before, after in _changed_codes(original, changed):
        for function in functions.get(_place(before), []):
            function.__code__ = after


def _changed_codes(original: CodeType, changed: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    if original == changed:
        return
    yield original, changed
    before = _inner_codes(original)
    after = _inner_codes(changed)
    if len(before) == len(after):
        for inner, changed_inner in zip(before, after, strict=True):
            yield from _changed_codes(inner, changed_inner)


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_from(folder: Path, code: CodeType) -> bool:
    return code.co_filename.startswith(str(folder))


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno
