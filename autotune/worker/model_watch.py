"""Bytes of the models inside the processes of a launched run.

The request of the run may contain a table, `watch`:

    steps     methods, as "module:Class.method", after which the state of an optimizer step exists
    uses      methods after which the models of processes that do not train are measured
    holders   objects that hold models:
        cls         "module:Class": objects of this class or of a subclass
        noted       true: recorded at their construction; else found by a search
        models      {"policy": "path.to.it", "reference": "..."}
        optimizer   "path.to.it" | null

Each Python process of the run starts with `startup/sitecustomize.py`, whose call of `begin` waits
for these classes. Each process writes its figures into a folder of the run; `read_ranks` merges
them by rank.

A model gets its role from the object that holds it, never from its form; a model without a known
holder is `other`. The models of an inference engine are left out.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .import_hook import AfterImport, Patch
from .model_memory import OTHER_ROLE, ModelBytes, sum_up
from .protocol import Request, Result

TABLE_VARIABLE = "AUTOTUNE_MODELS"
OUTPUT_VARIABLE = "AUTOTUNE_MODELS_TO"
STARTUP = Path(__file__).resolve().parent / "startup"
FOLDER = "models"
MAX_MEASUREMENTS = 2  # per method and object: the state of a step is complete after the first step
POLICY_ROLE = "policy"
ENGINE_MODULES = ("vllm", "sglang")


# The parent of the run.


def environment(
    watch: Any,
    folder: Path,
    before: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to add to the run's environment `before`; none without a table."""
    if not watch:
        return {}
    (folder / FOLDER).mkdir(exist_ok=True)
    paths = [str(STARTUP)]
    if before.get("PYTHONPATH"):
        paths.append(before["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        TABLE_VARIABLE: json.dumps(watch),
        OUTPUT_VARIABLE: str(folder / FOLDER),
    }


def read_ranks(folder: Path) -> list[Result]:
    """Return the bytes by rank and part; processes of one rank are added up."""
    bytes_by_rank: dict[int, dict[str, int]] = {}
    files = (folder / FOLDER).glob("*.json")
    for file in sorted(files):
        report = json.loads(file.read_text(encoding="utf-8"))
        rank = int(report["rank"])
        parts = bytes_by_rank.setdefault(rank, {})
        for name, size in report["bytes"].items():
            before = parts.get(name, 0)
            parts[name] = before + int(size)
    ranks = []
    for rank, parts in sorted(bytes_by_rank.items()):
        if parts:
            ranks.append({"rank": rank, "bytes": parts})
    return ranks


# A process of the run.


def begin() -> None:
    """Install the hooks, before anything of the framework is imported."""
    table = os.environ.get(TABLE_VARIABLE)
    output = os.environ.get(OUTPUT_VARIABLE)
    if table and output:
        uses = json.loads(table)
        ModelWatch(uses, Path(output)).install()


class _HolderRow(NamedTuple):
    """Objects that hold models."""

    class_name: str  # "module:Class"
    is_noted: bool
    models: Mapping[str, str]  # attribute path of each role's model
    optimizer: str | None  # attribute path


class _ModelReading(NamedTuple):
    """Bytes of one role's models, at one moment. The larger of two readings counts."""

    after_step: bool
    total: int
    parts: Mapping[str, int]


class ModelWatch:
    """Hooks of one process, and what they measured."""

    def __init__(self, table: Request, folder: Path) -> None:
        self._folder = folder
        self._steps = table["steps"]
        self._uses = table["uses"]
        self._rows: dict[str, _HolderRow] = {}  # by class
        for row in table["holders"]:
            self._rows[row["cls"]] = _HolderRow(
                class_name=row["cls"],
                is_noted=bool(row.get("noted")),
                models=row["models"],
                optimizer=row.get("optimizer"),
            )
        self._noted: dict[int, weakref.ref[Any]] = {}  # holders by id
        self._measurements: dict[tuple[str, int], int] = {}  # by method and id of its object
        self._readings: dict[str, _ModelReading] = {}  # by role

    def install(self) -> None:
        """Patch each method of the table as soon as its module is imported."""
        patches: dict[str, list[Patch]] = {}
        for method, action in self._actions().items():
            module, _, name = method.partition(":")
            patch = functools.partial(_patch_method, name=name, then=action)
            patches.setdefault(module, []).append(patch)
        sys.meta_path.insert(0, AfterImport(patches))

    def _actions(self) -> dict[str, Callable[[Any], None]]:
        """Return what to call with a method's object after each of its calls."""
        actions: dict[str, Callable[[Any], None]] = {}
        for row in self._rows.values():
            if row.is_noted:
                actions[f"{row.class_name}.__init__"] = self._note
        for method in self._uses:
            actions[method] = functools.partial(self._after_call, method, False)
        for method in self._steps:
            actions[method] = functools.partial(self._after_call, method, True)
        return actions

    def _note(self, holder: Any) -> None:
        forget = functools.partial(self._noted.pop, id(holder))
        self._noted[id(holder)] = weakref.ref(holder, forget)

    def _after_call(
        self,
        method: str,
        is_step: bool,
        instance: Any,
    ) -> None:
        key = method, id(instance)
        count = self._measurements.get(key, 0)
        if count >= MAX_MEASUREMENTS:
            return
        self._measurements[key] = count + 1
        try:
            self._measure(is_step)
        except Exception as error:  # a failed measurement must not end the run
            self._measurements[key] = MAX_MEASUREMENTS
            sys.stderr.write(
                f"autotune: the models of this process can't be summed up: {error!r}\n"
            )

    def _measure(self, is_step: bool) -> None:
        models = list(self._models())
        if not models:
            return
        models.sort(key=lambda model_bytes: model_bytes.role == "")  # the policy last
        device = "cuda" if _torch().cuda.is_initialized() else "cpu"
        sizes = sum_up(models, device, unassigned=_root_modules())
        roles = {model_bytes.role for model_bytes in models}
        for role, parts in _by_role(sizes, roles).items():
            # Models that alternate on a device count at their own maximum. Before a step, weights
            # gathered for a pass may still be present; hence a measurement after a step wins.
            total = sum(parts.values())
            reading = _ModelReading(is_step, total, parts)
            before = self._readings.get(role, reading)
            self._readings[role] = max(reading, before, key=lambda reading: reading[:2])
        self._write()

    def _write(self) -> None:
        sizes: dict[str, int] = {}
        for reading in self._readings.values():
            sizes.update(reading.parts)
        path = self._folder / f"{os.getpid()}.json"
        partial = path.with_suffix(".part")
        report = json.dumps({"rank": _rank(), "bytes": sizes})
        partial.write_text(report, encoding="utf-8")
        partial.replace(path)

    def _models(self) -> Iterator[ModelBytes]:
        """Yield the models of all holders."""
        for holder, row in self._holders():
            optimizer = _resolve(holder, row.optimizer)
            for role, path in row.models.items():
                for model in _modules_in(_resolve(holder, path)):
                    yield ModelBytes("" if role == POLICY_ROLE else role, model, optimizer)

    def _holders(self) -> Iterator[tuple[Any, _HolderRow]]:
        """Yield each model holder of this process with its row, that of the nearest class."""
        objects = {id(instance): instance for instance in gc.get_objects()}
        for reference in list(self._noted.values()):
            holder = reference()
            objects[id(holder)] = holder
        row_of_class: dict[type, _HolderRow | None] = {}
        for instance in objects.values():
            cls = type(instance)
            if cls not in row_of_class:
                row_of_class[cls] = self._row_of(cls)
            row = row_of_class[cls]
            if row is not None:
                yield instance, row

    def _row_of(self, cls: type) -> _HolderRow | None:
        for ancestor in cls.__mro__:
            name = f"{ancestor.__module__}:{ancestor.__qualname__}"
            if name in self._rows:
                return self._rows[name]
        return None


def _patch_method(
    module: Any,
    *,
    name: str,
    then: Callable[[Any], None],
) -> None:
    """Have `Class.method` of this module call `then` with its object after each return."""
    owner, _, method = name.rpartition(".")
    cls = getattr(module, owner, None)
    original = getattr(cls, method, None)
    if not isinstance(cls, type) or original is None:
        sys.stderr.write(
            f"autotune: {module.__name__} has no {name}, which models are measured by\n"
        )
        return

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self)
        return result

    functools.update_wrapper(watched, original)
    # Ray ships a class by value but its methods by name: with these names the receiver finds its
    # own, watched method.
    watched.__module__ = cls.__module__
    watched.__qualname__ = f"{cls.__qualname__}.{method}"
    setattr(cls, method, watched)


def _resolve(holder: Any, path: str | None) -> Any:
    """Return the object at an attribute path; None if there is none."""
    if not path:
        return None
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


def _modules_in(value: Any) -> list[Any]:
    """Return the modules among a value or a list: a list of rewards has models and functions."""
    values = value if isinstance(value, (list, tuple)) else [value]
    module_class = _torch().nn.Module
    return [module for module in values if isinstance(module, module_class)]


def _root_modules() -> list[Any]:
    """Modules without a parent module, except those of an engine."""
    module_class = _torch().nn.Module
    modules = []
    children: set[int] = set()  # by id
    for instance in gc.get_objects():
        if issubclass(type(instance), module_class) and "_modules" in instance.__dict__:
            modules.append(instance)
            submodules = instance.__dict__["_modules"]
            children.update(map(id, submodules.values()))

    roots = []
    for module in modules:
        module_name = type(module).__module__
        package = module_name.partition(".")[0]
        if id(module) not in children and package not in ENGINE_MODULES:
            roots.append(module)
    return roots


def _by_role(sizes: Mapping[str, int], roles: set[str]) -> dict[str, dict[str, int]]:
    """Split parts by role: their names start with it, except those of the policy."""
    prefixed_roles = (roles | {OTHER_ROLE}) - {""}
    parts_by_role: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        role = next((role for role in prefixed_roles if name.startswith(f"{role}_")), "")
        parts_by_role.setdefault(role, {})[name] = size
    return parts_by_role


def _rank() -> int:
    """Rank in the process's own group: policy and reference groups both count from zero."""
    distributed = _torch().distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _torch() -> Any:
    import torch

    return torch
