"""Patch for TRL with vLLM on a CPU, whose layers drop the weights that TRL updates.

It is copied as sitecustomize.py beside the files of such a run. Python executes it at its start, in
the process that will import vLLM. A GPU run does not need it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any

PATCHED_MODULE = "vllm.model_executor.layers.utils"

# The engine shares its process with the trainer, so it must not bind the trainer's threads to
# cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


class KeepWeights(importlib.abc.MetaPathFinder):
    """Patches the module when it is imported, and removes itself."""

    def find_spec(
        self,
        fullname: str,
        path: Any,
        target: Any = None,
    ) -> Any:
        if fullname != PATCHED_MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            module.dispatch_cpu_unquantized_gemm = plain

        spec.loader.exec_module = execute_and_patch
        return spec


def plain(layer: Any, *_: Any, **__: Any) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


if importlib.util.find_spec("vllm") is not None:
    sys.meta_path.insert(0, KeepWeights())
