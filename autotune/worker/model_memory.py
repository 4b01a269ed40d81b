"""Bytes of each model of this process, and of the models inside the processes of a launched run.

Part names equal those of a prediction: plain for the policy (`weights`, `adapters`, `gradients`,
`optimizer`), with the role as prefix for other models (`reference_weights`), with the suffix
`_on_host` for tensors on the host beside a GPU. Storages count once and whole, so the padding of a
shard counts and a view does not. Not included: activations, a wrapper's own buffers, an engine.

The request of a launched run may contain a table:

    "watch": {"steps": ["module:Class.method", ...],            after it, the state of an optimizer step exists
              "uses": ["module:Class.method", ...],             the same in processes that do not train
              "holders": [{"cls": "module:Class",               objects of this class or of a subclass
                           "noted": true,                       recorded at construction; else found by a search
                           "models": {"policy": "path.to.it", "reference": "..."},
                           "optimizer": "path.to.it" | null}, ...]}

Each Python process of the run starts with `startup/sitecustomize.py`, whose call of `begin` waits
for these classes. Each process writes its figures into a folder of the run; `found` merges them by
rank.

A model gets its role from the object that holds it, never from its form; a model without a known
holder is `other`. The models of an inference engine are left out.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# DeepSpeed's float32 copies under ZeRO-3, and under ZeRO-1 and -2.
MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
PARTITIONED_GRADIENTS = ("averaged_gradients", "grad_partitions_flat_buffer")


class ModelBytes(NamedTuple):
    """Model to measure, with its role and its optimizer."""

    role: str  # empty for the policy
    model: Any
    # Its optimizer, wrapped or not. One that trains several models counts for the last of them.
    optimizer: Any = None


def sum_up(models: Iterable[ModelBytes], device: str, others: Iterable[Any] = ()) -> dict[str, int]:
    """Return bytes by part. Modules in `others` count as `other`, without the tensors of `models`.

    Right after an optimizer step everything exists at once: gradients and optimizer states.
    """
    import torch

    totals = _Totals(device)
    models = list(models)
    with torch.no_grad():
        for group in (models, [ModelBytes(role="other", model=module) for module in others]):
            for one in group:
                _add_model(totals, one)
            for one in {
                id(one.optimizer): one for one in group if one.optimizer is not None
            }.values():
                _add_shared_optimizer_state(totals, one)
    return totals.found


def _add_model(totals: _Totals, one: ModelBytes) -> None:
    parameters, optimizers = list(one.model.parameters()), list(_layers(one.optimizer))
    state = getattr(optimizers[-1], "state", None) if optimizers else None
    totals.add(one.role, "gradients", [parameter.grad for parameter in parameters])
    adapted = any(hasattr(module, "peft_config") for module in one.model.modules())
    for parameter in parameters:
        name = "adapters" if adapted and parameter.requires_grad else "weights"
        totals.add(one.role, name, list(_of_parameter(parameter)))
        if state and parameter in state:
            totals.add(one.role, "optimizer", [state[parameter]])
    totals.add(one.role, "weights", list(one.model.buffers()))


def _add_shared_optimizer_state(totals: _Totals, one: ModelBytes) -> None:
    """Add the tensors that an optimizer keeps for all parameters together."""
    inner = None
    for inner in _layers(one.optimizer):
        totals.add(
            one.role, "gradients", [getattr(inner, name, None) for name in PARTITIONED_GRADIENTS]
        )
        masters = [getattr(inner, name, None) for name in MASTERS]
        totals.add(
            one.role, "gradients", [tensor.grad for tensor in _tensors(masters) if tensor.is_leaf]
        )
        totals.add(one.role, "optimizer", masters)
    totals.add(one.role, "optimizer", list(getattr(inner, "state", {}).values()))
    totals.add(
        one.role, "optimizer", [group["params"] for group in getattr(inner, "param_groups", ())]
    )


def _of_parameter(parameter: Any) -> Iterator[Any]:
    """Yield the parameter, DeepSpeed's local shard of it, and bitsandbytes' quantisation state."""
    yield parameter
    yield getattr(parameter, "ds_tensor", None)
    quantised = getattr(parameter, "quant_state", None)
    while quantised is not None:
        yield list(getattr(quantised, "__dict__", {}).values())
        quantised = getattr(quantised, "state2", None)


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield accelerate's wrapper, DeepSpeed's, and the innermost optimizer."""
    while optimizer is not None:
        yield optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = None if inner is optimizer else inner


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the local part of each tensor in nested lists and mappings."""
    if hasattr(value, "untyped_storage"):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


class _Totals:
    """Bytes by part, each storage counted once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._counted: set[tuple[str, int]] = set()
        self.found: dict[str, int] = {}

    def add(self, role: str, name: str, values: list[Any]) -> None:
        named = f"{role}_{name}" if role else name
        for tensor in _tensors(values):
            kind = tensor.device.type
            if kind == "meta" or not tensor.dim():  # scalars: Adam's step counters
                continue
            storage = tensor.untyped_storage()
            address = (str(tensor.device), storage.data_ptr())
            if not storage.nbytes() or address in self._counted:
                continue
            self._counted.add(address)
            part = named if kind == self._device else f"{named}_on_host"
            self.found[part] = self.found.get(part, 0) + int(storage.nbytes())


TABLE_VARIABLE, OUTPUT_VARIABLE = "AUTOTUNE_MODELS", "AUTOTUNE_MODELS_TO"
STARTUP = Path(__file__).resolve().parent / "startup"
FOLDER = "models"
MAX_MEASUREMENTS = 2  # per method and object: the state of a step is complete after the first step
POLICY = "policy"
ENGINES = ("vllm", "sglang")


def environment(watch: Any, folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the run's environment `before`; none without a table."""
    if not watch:
        return {}
    (folder / FOLDER).mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(STARTUP), before.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path,
        TABLE_VARIABLE: json.dumps(watch),
        OUTPUT_VARIABLE: str(folder / FOLDER),
    }


def found(folder: Path) -> list[dict[str, Any]]:
    """Return the bytes by rank and part; processes of one rank are added up."""
    ranks: dict[int, dict[str, int]] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        parts = ranks.setdefault(int(report["rank"]), {})
        for name, size in report["bytes"].items():
            parts[name] = parts.get(name, 0) + int(size)
    return [{"rank": rank, "bytes": parts} for rank, parts in sorted(ranks.items()) if parts]


def begin() -> None:
    """Install the hooks, before anything of the framework is imported."""
    table, output = os.environ.get(TABLE_VARIABLE), os.environ.get(OUTPUT_VARIABLE)
    if table and output:
        _Watch(json.loads(table), Path(output)).install()


class _Watch:
    def __init__(self, table: dict[str, Any], folder: Path) -> None:
        self._table, self._folder = table, folder
        self._noted: dict[int, weakref.ref[Any]] = {}
        self._measurements: dict[tuple[str, int], int] = {}
        self._best: dict[str, tuple[bool, int, dict[str, int]]] = {}

    def install(self) -> None:
        """Patch each method of the table as soon as its module is imported."""
        actions = {
            f"{row['cls']}.__init__": self._note
            for row in self._table["holders"]
            if row.get("noted")
        }
        for kind in ("uses", "steps"):
            actions |= {
                method: functools.partial(self._called, method, kind == "steps")
                for method in self._table[kind]
            }
        patches: dict[str, list[Callable[[Any], None]]] = {}
        for place, action in actions.items():
            module, _, name = place.partition(":")
            patches.setdefault(module, []).append(functools.partial(_patch, name=name, then=action))
        sys.meta_path.insert(0, _AfterImport(patches))

    def _note(self, made: Any) -> None:
        self._noted[id(made)] = weakref.ref(made, functools.partial(self._noted.pop, id(made)))

    def _called(self, method: str, stepped: bool, instance: Any) -> None:
        key = method, id(instance)
        if self._measurements.get(key, 0) >= MAX_MEASUREMENTS:
            return
        self._measurements[key] = self._measurements.get(key, 0) + 1
        try:
            self._measure(stepped)
        except Exception as error:  # a failed measurement must not end the run
            self._measurements[key] = MAX_MEASUREMENTS
            sys.stderr.write(
                f"autotune: the models of this process can't be summed up: {error!r}\n"
            )

    def _measure(self, stepped: bool) -> None:
        models = [
            ModelBytes(
                role="" if role == POLICY else role,
                model=model,
                optimizer=_resolve(holder, row.get("optimizer")),
            )
            for holder, row in self._holders()
            for role, path in row["models"].items()
            for model in _models(_resolve(holder, path))
        ]
        if not models:
            return
        models.sort(key=lambda one: one.role == "")  # the policy last: see `ModelBytes`
        device = "cuda" if _torch().cuda.is_initialized() else "cpu"
        sizes = sum_up(models, device, others=_roots())
        for role, parts in _by_role(sizes, {one.role for one in models}).items():
            # Models that alternate on a device count at their own maximum. Before a step, weights
            # gathered for a pass may still be present; hence a measurement after a step wins.
            seen = stepped, sum(parts.values()), parts
            self._best[role] = max(seen, self._best.get(role, seen), key=lambda one: one[:2])
        sizes = {name: size for *_, parts in self._best.values() for name, size in parts.items()}
        path = self._folder / f"{os.getpid()}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"rank": _rank(), "bytes": sizes}), encoding="utf-8")
        partial.replace(path)

    def _holders(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each model holder of this process with its row, that of the nearest class."""
        rows = {row["cls"]: row for row in self._table["holders"]}
        noted = (reference() for reference in list(self._noted.values()))
        row_of: dict[type, dict[str, Any] | None] = {}
        for holder in {id(one): one for one in (*gc.get_objects(), *noted)}.values():
            cls = type(holder)
            if cls not in row_of:
                names = (f"{one.__module__}:{one.__qualname__}" for one in cls.__mro__)
                row_of[cls] = next((rows[name] for name in names if name in rows), None)
            row = row_of[cls]
            if row is not None:
                yield holder, row


class _AfterImport(importlib.abc.MetaPathFinder):
    """Applies patches to modules right after their import."""

    def __init__(self, patches: dict[str, list[Callable[[Any], None]]]) -> None:
        self._patches = patches

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._patches:
            return None
        # Only those behind this one: another hook of this kind would ask this one again, without
        # end.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        others = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec = next(
            (
                one
                for finder in others
                if (one := finder.find_spec(fullname, path, target)) is not None
            ),
            None,
        )
        if spec is None or spec.loader is None:
            return spec
        patches, execute = self._patches.pop(fullname), spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch(module: Any, *, name: str, then: Callable[[Any], None]) -> None:
    """Have `Class.method` of this module call `then` with its object after each return."""
    owner, _, method = name.rpartition(".")
    cls = getattr(module, owner, None)
    original = getattr(cls, method, None)
    if not isinstance(cls, type) or original is None:
        sys.stderr.write(
            f"autotune: {module.__name__} has no {name}, which models are measured by\n"
        )
        return

    def watched(self: Any, *args: Any, **rest: Any) -> Any:
        result = original(self, *args, **rest)
        then(self)
        return result

    functools.update_wrapper(watched, original)
    # Ray ships a class by value but its methods by name: with these names the receiver finds its
    # own, watched method.
    watched.__module__, watched.__qualname__ = cls.__module__, f"{cls.__qualname__}.{method}"
    setattr(cls, method, watched)


def _resolve(holder: Any, path: str | None) -> Any:
    """Return the object at an attribute path; None if there is none."""
    for name in path.split(".") if path else ():
        holder = getattr(holder, name, None)
    return holder if path else None


def _models(value: Any) -> list[Any]:
    """Return the modules among a value or a list: a list of rewards has models and functions."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, _torch().nn.Module)]


def _roots() -> list[Any]:
    """Modules without a parent module, except those of an engine."""
    module = _torch().nn.Module
    modules = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), module) and "_modules" in one.__dict__
    ]
    inner = {id(child) for one in modules for child in one.__dict__["_modules"].values()}
    return [
        one
        for one in modules
        if id(one) not in inner and type(one).__module__.partition(".")[0] not in ENGINES
    ]


def _by_role(sizes: dict[str, int], roles: set[str]) -> dict[str, dict[str, int]]:
    """Split parts by role: their names start with it, except those of the policy."""
    others = (roles | {"other"}) - {""}
    split: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        role = next((one for one in others if name.startswith(f"{one}_")), "")
        split.setdefault(role, {})[name] = size
    return split


def _rank() -> int:
    """Rank in the process's own group: policy and reference groups both count from zero."""
    distributed = _torch().distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _torch() -> Any:
    import torch

    return torch


TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower"})


def layers_of(model: Any) -> list[Any]:
    """Return the longest ModuleList outside towers; empty without one."""
    import torch

    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and TOWERS.isdisjoint(name.split("."))
    ]
    return max((list(layers) for layers in found), key=len, default=[])
