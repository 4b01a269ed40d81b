"""Emulated cards in use: the environment of a command whose processes see them, and NVML for the process that watches."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from autotune.emulator.build import Built
from autotune.emulator.cards import EmulatedMachine
from autotune.emulator.installation import Installation

INJECTED = Path(__file__).parent / "inject"

_DEFAULTS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "DS_BUILD_OPS": "0",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    "RAY_LD_PRELOAD_ON_WORKERS": "1",
    "RAY_worker_niceness": "0",
}
"""Defaults that the user's environment overrides. vLLM's second runner counts tokens inside a Triton kernel, so that
generation never ends; FlashInfer compiles its sampler with nvcc; DeepSpeed's operators need nvcc too; humming (of vLLM)
compiles a launcher of quantised kernels at every import; Ray removes preloaded libraries from workers, and runs them at
niceness 15, while everything is computed on the host."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Files of a running machine; processes that name the same one share its cards."""

    folder: Path

    @property
    def reports(self) -> Path:
        return self.folder / "reports"


def set_up(machine: EmulatedMachine, installation: Installation, folder: Path) -> Stand:
    """Return a machine in this folder, with nothing on its cards yet."""
    made = Stand(folder=folder)
    made.reports.mkdir(parents=True, exist_ok=True)
    (folder / "machine").write_text(machine.text(installation.cuda))
    (folder / "state").unlink(missing_ok=True)
    return made


def environment(
    ours: Mapping[str, str], built: Built, stand: Stand, *, phases: bool = False, stride: int | None = None
) -> dict[str, str]:
    """Return the environment of a command whose processes are to see the emulated cards.

    `stride`: number of tokens for which a decoded one stands (`inject/emulator_rollouts.py`).
    """
    added = {
        "LD_PRELOAD": _before(built.library, ours.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _before(built.folder, ours.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _before(INJECTED, ours.get("PYTHONPATH")),
        "TRITON_LIBCUDA_PATH": str(built.folder),
        # A cluster that already runs is found by these two, and its workers see no emulated card.
        "RAY_TMPDIR": str(stand.folder),
        "RAY_ADDRESS": "",
        **variables(stand),
    }
    if phases:
        added["AUTOTUNE_EMULATOR_PHASES"] = "1"
    if stride is not None:
        added["AUTOTUNE_EMULATOR_STRIDE"] = str(stride)
    return {**_DEFAULTS, **ours, **added}


def variables(stand: Stand) -> dict[str, str]:
    """Return the variables by which the library finds its machine."""
    return {
        "AUTOTUNE_EMULATED_MACHINE": str(stand.folder / "machine"),
        "AUTOTUNE_EMULATED_STATE": str(stand.folder / "state"),
        "AUTOTUNE_EMULATOR_REPORT": str(stand.reports),
    }


def _before(path: Path, others: str | None) -> str:
    return os.pathsep.join([str(path), *([others] if others else [])])


def nvml_of(built: Built, stand: Stand) -> ModuleType:
    """Return nvidia-ml-py's module, bound to the cards of this stand, for the process that watches them from outside.

    The module is a copy of its own and so is the library: a process may watch several machines, real ones among them.
    """
    original = importlib.util.find_spec("pynvml")
    assert original is not None and original.origin is not None  # a dependency of autotune
    spec = importlib.util.spec_from_file_location(f"pynvml of {stand.folder.name}", original.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there
    spec.loader.exec_module(module)
    library = stand.folder / "libnvidia-ml-watching.so"
    shutil.copyfile(built.library, library)
    named = variables(stand)  # the library reads them once, while it is loaded
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        module.nvmlLib = ctypes.CDLL(str(library))  # type: ignore[attr-defined]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return module
