"""Liger's kernels and chunked losses without a GPU.

The installed liger-kernel runs as it is: its functions allocate what their kernels write, chunk by chunk, so that the memory is
theirs; the kernels themselves launch nothing. Where a function takes another way on CUDA, it takes that.

Its preference losses are compiled when torch can. Fake tensors cannot be compiled: the same functions run one operation after
another, which keeps more temporaries inside one chunk. `NOTE` says so.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import Untraceable, believing, kernels
from .swap import attribute

NOTE = "liger's chunked loss is followed uncompiled: inside one chunk a GPU may keep fewer temporaries"


def wanted(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("use_liger_kernel") or settings.get("use_liger_loss"))


def notes(spec: Mapping[str, Any]) -> list[str]:
    """What a trace of this specification does not follow to the letter."""
    return [NOTE] if wanted(spec.get("settings", {})) and spec.get("method") != "sft" else []


@contextmanager
def installed(spec: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile Liger works on fake tensors, where the settings ask for it."""
    if not wanted(spec.get("settings", {})):
        yield
        return
    _load()
    with contextlib.ExitStack() as stack:
        stack.enter_context(believing.on_cuda("liger_kernel", lambda name: name.startswith("liger_kernel.ops.fused_linear_")))
        stack.enter_context(kernels.not_launched("liger_kernel.ops."))
        stack.enter_context(attribute(torch, "compile", _uncompiled))
        stack.enter_context(_models_as_before(spec))
        yield


def _load() -> None:
    """All of its operations, so that none is imported later with its kernels in place."""
    try:
        for name in ("liger_kernel.transformers", "liger_kernel.chunked_loss"):
            importlib.import_module(name)
    except ImportError as error:
        raise Untraceable(f"the settings ask for Liger's kernels, and liger-kernel cannot be imported here: {error}") from error


@contextmanager
def _models_as_before(spec: Mapping[str, Any]) -> Iterator[None]:
    """Liger puts its own into transformers' modules, for good; the next trace in this process may not want that."""
    kind = str((spec["model"].get("config") or {}).get("model_type", ""))
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    modules = [
        module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.") and ".modeling_" in name
    ]
    holders = [*modules, *{value for module in modules for value in vars(module).values() if isinstance(value, type)}]
    before = [(holder, dict(vars(holder))) for holder in holders]
    try:
        yield
    finally:
        for holder, names in before:
            for name, value in list(vars(holder).items()):
                if names.get(name) is not value and str(getattr(value, "__module__", "")).startswith("liger_kernel"):
                    setattr(holder, name, names[name]) if name in names else delattr(holder, name)


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return function if function is not None else lambda function: function
