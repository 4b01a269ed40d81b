"""In a process of somebody else's run: waits for the classes that hold models, and sums these up when there is something to see.

`watched.py` says what it is told and who reads what it writes. A model is never looked for by its looks: a role is what the
holder keeps it as, and a model that no known holder keeps is `other`. An engine's models are the engine's, and are left out.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TABLE, WHERE = "AUTOTUNE_MODELS", "AUTOTUNE_MODELS_TO"

LOOKS = 2
"""At a moment of one object's: a step's state is there after the first, and nothing comes to it later."""

POLICY = "policy"
ENGINES = ("vllm", "sglang")


def begin() -> None:
    """At the start of a process, before anything of the framework is imported."""
    table, where = os.environ.get(TABLE), os.environ.get(WHERE)
    if table and where:
        _Watch(json.loads(table), Path(where)).wait()


class _Watch:
    def __init__(self, table: dict[str, Any], folder: Path) -> None:
        self._table, self._folder = table, folder
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._looks: dict[tuple[str, int], int] = {}
        self._best: dict[str, tuple[bool, int, dict[str, int]]] = {}

    def wait(self) -> None:
        """For the modules of these classes."""
        wanted: dict[str, list[Callable[[Any], None]]] = {}
        acts = {f"{row['cls']}.__init__": self._note for row in self._table["holders"] if row.get("noted")}
        for kind in ("uses", "steps"):
            acts |= {moment: functools.partial(self._moment, moment, kind == "steps") for moment in self._table[kind]}
        for where, act in acts.items():
            module, _, name = where.partition(":")
            wanted.setdefault(module, []).append(_patch(name, act))
        sys.meta_path.insert(0, _OnceImported(wanted))

    def _note(self, made: Any) -> None:
        gone = functools.partial(self._alive.pop, id(made))
        self._alive[id(made)] = weakref.ref(made, gone)

    def _moment(self, moment: str, stepped: bool, whose: Any) -> None:
        key = moment, id(whose)
        if self._looks.get(key, 0) >= LOOKS:
            return
        self._looks[key] = self._looks.get(key, 0) + 1
        try:
            self._look(stepped)
        except Exception as error:  # a run must not end because nobody could look into it
            self._looks[key] = LOOKS
            sys.stderr.write(f"autotune: the models of this process can't be summed up: {error!r}\n")

    def _look(self, stepped: bool) -> None:
        from .weighing import weigh_all

        held = list(self._held())
        if not held:
            return
        device = "cuda" if _torch().cuda.is_initialized() else "cpu"
        found = weigh_all(held, device, _roots())
        for role, parts in _by_role(found, {one.role for one in held}).items():
            # Models that take turns are each as in their own; before a step, what was gathered for a pass may still lie there.
            seen = stepped, sum(parts.values()), parts
            self._best[role] = max(seen, self._best.get(role, seen), key=lambda one: one[:2])
        self._write()

    def _held(self) -> Iterator[Any]:
        """The policy last: see `weighing.Held`."""
        from .weighing import Held

        one_after_the_other = [
            Held(role="" if role == POLICY else role, model=model, optimizer=_at(keeper, row.get("optimizer")))
            for keeper, row in self._keepers()
            for role, path in row["models"].items()
            for model in _models(_at(keeper, path))
        ]
        yield from sorted(one_after_the_other, key=lambda one: one.role == "")

    def _keepers(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Who holds models here, each with its row: that of its own class before those of what it is made from."""
        rows = {row["cls"]: row for row in self._table["holders"]}
        noted = (reference() for reference in list(self._alive.values()))
        row_of: dict[type, dict[str, Any] | None] = {}
        for keeper in {id(one): one for one in (*gc.get_objects(), *noted)}.values():
            cls = type(keeper)
            if cls not in row_of:
                names = (f"{one.__module__}:{one.__qualname__}" for one in cls.__mro__)
                row_of[cls] = next((rows[name] for name in names if name in rows), None)
            row = row_of[cls]
            if row is not None:
                yield keeper, row

    def _write(self) -> None:
        parts = {name: size for *_, one in self._best.values() for name, size in one.items()}
        path = self._folder / f"{os.getpid()}.json"
        half = path.with_suffix(".part")
        half.write_text(json.dumps({"rank": _rank(), "bytes": parts}), encoding="utf-8")
        half.replace(path)


class _OnceImported(importlib.abc.MetaPathFinder):
    """Hands over each module of these as soon as it was imported."""

    def __init__(self, wanted: dict[str, list[Callable[[Any], None]]]) -> None:
        self._wanted = wanted

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._wanted:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((one for finder in others if (one := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        act, execute = self._wanted.pop(fullname), spec.loader.exec_module

        def execute_and_hand_over(module: Any) -> None:
            execute(module)
            for one in act:
                one(module)

        spec.loader.exec_module = execute_and_hand_over  # type: ignore[method-assign]
        return spec


def _patch(name: str, then: Callable[[Any], None]) -> Callable[[Any], None]:
    """What has a method of a module's class call `then` with its object, whenever it came to its end."""

    def patch(module: Any) -> None:
        owner, _, method = name.rpartition(".")
        cls = getattr(module, owner, None)
        original = getattr(cls, method, None)
        if not isinstance(cls, type) or original is None:
            sys.stderr.write(f"autotune: {module.__name__} has no {name}, which models are seen by\n")
            return

        def watched(self: Any, *args: Any, **rest: Any) -> Any:
            result = original(self, *args, **rest)
            then(self)
            return result

        functools.update_wrapper(watched, original)
        # Who ships this class by its value, as Ray does, ships the method by its name: over there it is watched in its own right.
        watched.__module__, watched.__qualname__ = cls.__module__, f"{cls.__qualname__}.{method}"
        setattr(cls, method, watched)

    return patch


def _at(holder: Any, path: str | None) -> Any:
    """What lies there; None where there is nothing, as beside a reference that is not needed."""
    for name in path.split(".") if path else ():
        holder = getattr(holder, name, None)
    return holder if path else None


def _models(value: Any) -> Iterable[Any]:
    """One, or a list among which there may be some: rewards are models and functions."""
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, _torch().nn.Module)]


def _roots() -> list[Any]:
    """Modules that are part of none, but for an engine's."""
    module = _torch().nn.Module
    every = [one for one in gc.get_objects() if issubclass(type(one), module) and "_modules" in one.__dict__]
    inner = {id(child) for one in every for child in one.__dict__["_modules"].values()}
    return [one for one in every if id(one) not in inner and not _is_an_engines(one)]


def _is_an_engines(module: Any) -> bool:
    return type(module).__module__.partition(".")[0] in ENGINES


def _by_role(found: dict[str, int], roles: set[str]) -> dict[str, dict[str, int]]:
    """Apart again: parts of another model than the policy begin with its role."""
    others = (roles | {"other"}) - {""}
    apart: dict[str, dict[str, int]] = {}
    for name, size in found.items():
        role = next((one for one in others if name.startswith(f"{one}_")), "")
        apart.setdefault(role, {})[name] = size
    return apart


def _rank() -> int:
    """In its own group: that of the policy and that of the reference count from zero, each for itself."""
    distributed = _torch().distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _torch() -> Any:
    import torch

    return torch
