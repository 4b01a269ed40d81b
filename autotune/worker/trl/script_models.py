"""Models and engines that a script has on its GPUs beside the one that it trains: judges of its
rewards, teachers, an engine of vLLM that it starts itself.

The models that are there when the training begins are counted by their weights
(`models_beside`). Engines are reported only, and the loaders in the code of a reward, which a
script often calls at its first step only.
"""

from __future__ import annotations

import gc
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .missing_arguments import IsLibrary, Report
from .placeholder import Anything

STARTED_CLASSES = {
    "vllm": ("LLM", "LLMEngine", "AsyncLLMEngine"),
    "sglang": ("Engine",),
    "sentence_transformers": ("SentenceTransformer", "CrossEncoder"),
    "detoxify": ("Detoxify",),
    "bert_score": ("BERTScorer",),
}
"""Package -> classes that put a model on a GPU."""

_LOADER = re.compile(
    r"^AutoModel|For(?:CausalLM|SequenceClassification|ConditionalGeneration)$"
    r"|^(?:SentenceTransformer|CrossEncoder|Detoxify|BERTScorer|LLM|pipeline)$"
)
"""Names by which code loads a model."""

MOST_FUNCTIONS = 40  # of the user's that are followed from a reward
_MOVED_TO = "_autotune_moved_to"
_PARAMETERS = "_autotune_parameters"


class _Loaded(NamedTuple):
    model: weakref.ref[Any]
    name: str
    is_placed: bool  # on a GPU by its loader
    device: str  # empty: not one that the script names


_loaded: list[_Loaded] = []


def note(
    model: Any,
    name: str,
    placement: Any,
) -> None:
    """Remember a model that the script loaded. `placement`: its device_map."""
    object.__setattr__(model, _PARAMETERS, count_of(model))
    is_placed = placement is not None and "cpu" not in str(placement)
    device = placement.get("", "") if isinstance(placement, Mapping) else placement
    _loaded.append(_Loaded(weakref.ref(model), name, is_placed, str(device)))


def count_of(model: Any) -> int:
    """Return the number of a model's parameters, without those of an adapter."""
    count = 0
    for name, parameter in model.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            count += int(parameter.numel())
    return count


def count_at_load(model: Any) -> int | None:
    """Return the number of parameters that a model had when it was loaded; None: it was not."""
    count: int | None = vars(model).get(_PARAMETERS)
    return count


def note_move(module: Any, device: str) -> None:
    """Remember to which device the script moved a module."""
    object.__setattr__(module, _MOVED_TO, device)


class ModelOnGpu(NamedTuple):
    """Model on a GPU that the script holds when its training begins."""

    name: str
    model: Any
    device: str  # as the script names it; empty: its loader's choice


def present() -> list[ModelOnGpu]:
    """Return the models on a GPU that the script still holds."""
    gc.collect()
    models = []
    for loaded in _loaded:
        model = loaded.model()
        if model is None:
            continue
        device = getattr(model, _MOVED_TO, None)
        is_on_gpu = loaded.is_placed if device is None else "cpu" not in device
        if is_on_gpu:
            models.append(ModelOnGpu(loaded.name, model, device or loaded.device))
    return models


def fill(module: types.ModuleType, report: Report) -> None:
    """Give a placeholder the classes that start an engine, each of which is reported."""
    for name in STARTED_CLASSES.get(module.__name__, ()):
        vars(module)[name] = _reported(name, report)


def _reported(name: str, report: Report) -> type:
    class Engine(Anything):
        """Engine of an absent package."""

        def __new__(cls, *args: Any, **options: Any) -> Any:
            first = next(iter(args), options.get("model", ""))
            report("engine", f"{name}({first})" if isinstance(first, str) and first else name)
            return Anything()

    Engine.__name__ = name
    return Engine


_CPU = (-1, "cpu")


def pipeline_of(report: Report) -> Callable[..., Any]:
    """Return a stand-in for transformers' pipelines, which reports the model that one loads."""

    def pipeline(
        task: Any = None,
        model: Any = None,
        *_: Any,
        **options: Any,
    ) -> Any:
        names = model is None or isinstance(model, str)
        if names and options.get("device") not in _CPU:
            report("engine", f"pipeline({model or task})")
        return Anything()

    return pipeline


def loaders_in(reward: Any, is_library: IsLibrary) -> Iterator[str]:
    """Yield the names by which the user's code behind a reward loads models."""
    waiting = list(_functions_of(reward, is_library))
    followed: set[int] = set()
    while waiting and len(followed) < MOST_FUNCTIONS:
        function = waiting.pop(0)
        if id(function) in followed:
            continue
        followed.add(id(function))
        for name in _names_in(function.__code__):
            if _LOADER.search(name):
                yield name
            value = function.__globals__.get(name)
            waiting += _functions_of(value, is_library)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _functions_of(value: Any, is_library: IsLibrary) -> Iterator[types.FunctionType]:
    """Yield the functions of the user's own that a value is, or has as its methods."""
    value = inspect.unwrap(getattr(value, "func", value)) if callable(value) else value
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, types.FunctionType):
        if not is_library(value.__code__.co_filename):
            yield value
        return
    if isinstance(value, types.ModuleType | str | int | float | list | dict) or value is None:
        return
    owner = value if isinstance(value, type) else type(value)
    for base in owner.__mro__:
        for member in vars(base).values():
            function = getattr(member, "__func__", member)
            if not isinstance(function, types.FunctionType):
                continue
            if not is_library(function.__code__.co_filename):
                yield function
