"""Liger's kernels and chunked losses without a GPU.

The installed liger-kernel runs unchanged: its functions allocate the outputs of their kernels, chunk by chunk, and the
kernels launch nothing. CUDA's branches are taken.

Its preference losses are compiled if torch can. Fake tensors cannot be compiled: the same functions run operation by
operation, with more temporaries inside a chunk. `NOTE` reports this.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from . import Untraceable, cuda_device_checks, kernels
from .patching import all_entered, attribute

NOTE = "liger's chunked loss is traced uncompiled: inside one chunk a GPU may keep fewer temporaries"


def wanted(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("use_liger_kernel") or settings.get("use_liger_loss"))


def notes(spec: Mapping[str, Any]) -> list[str]:
    """Return the deviations of a trace of this specification."""
    return [NOTE] if wanted(spec.get("settings", {})) and spec.get("method") != "sft" else []


@all_entered
def installed(spec: Mapping[str, Any]) -> Iterator[AbstractContextManager[None]]:
    """Run Liger on fake tensors, if the settings enable it."""
    if not wanted(spec.get("settings", {})):
        return
    try:  # all of its operations, so that none is imported later with active kernels
        for name in ("liger_kernel.transformers", "liger_kernel.chunked_loss"):
            importlib.import_module(name)
    except ImportError as error:
        raise Untraceable(
            f"Liger's kernels: liger-kernel cannot be imported: {error}. Install it, or turn off use_liger_kernel."
        ) from error
    yield cuda_device_checks.on_cuda("liger_kernel", lambda name: name.startswith("liger_kernel.ops.fused_linear_"))
    yield kernels.not_launched("liger_kernel.ops.")
    yield attribute(torch, "compile", lambda function=None, **_: (lambda function: function) if function is None else function)
    yield _restored_models(spec)


@contextmanager
def _restored_models(spec: Mapping[str, Any]) -> Iterator[None]:
    """Restore transformers' modules after the trace: Liger patches them for the whole process."""
    kind = str((spec["model"].get("config") or {}).get("model_type", ""))
    with suppress(ImportError):
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
