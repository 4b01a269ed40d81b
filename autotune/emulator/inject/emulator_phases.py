"""Phases of a step, reported to the emulated driver, which keeps the peak of each.

They are detected in functions that every framework calls: generation, the backward pass, the
optimizer's step, the transfer of weights to an engine. Everything before is loading; everything
between is the forward pass and its surroundings.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

_stack: list[str] = []
_torch: Any = None


def _library() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "emu_phase") else None


def _tell(name: str) -> None:
    library = _library()
    if library is None:
        return
    _note_torch(library)
    library.emu_phase(name.encode())


def _note_torch(library: Any) -> None:
    """Torch's own peaks so far: a program may reset them at any time."""
    if _torch is None or not _torch.cuda.is_initialized():
        return
    device = _torch.cuda.current_device()
    allocated, reserved = _torch.cuda.max_memory_allocated(device), _torch.cuda.max_memory_reserved(device)
    library.emu_note_torch(device, ctypes.c_int64(allocated), ctypes.c_int64(reserved))


def _within(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        _stack.append(phase)
        _tell(phase)
        try:
            return method(*args, **kwargs)
        finally:
            _stack.pop()
            _tell(_stack[-1] if _stack else "forward")

    return called


def _wrap(owner: Any, name: str, phase: str) -> None:
    if owner is not None and hasattr(owner, name):
        setattr(owner, name, _within(phase, getattr(owner, name)))


def watch_torch(torch: ModuleType) -> None:
    global _torch
    _torch = torch
    _tell("load")
    _wrap(torch.autograd, "backward", "backward")
    from torch.optim import optimizer

    profiled = optimizer.Optimizer.profile_hook_step

    def step(method: Callable[..., Any]) -> Callable[..., Any]:
        hooked: Callable[..., Any] = profiled(_within("optimizer", method))
        return hooked

    optimizer.Optimizer.profile_hook_step = staticmethod(step)
    atexit.register(lambda: _tell("end"))


def _watch_engine(engine: Any) -> None:
    _wrap(engine, "__init__", "engine start")
    _wrap(engine, "generate", "rollout")


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "transformers.generation.utils": lambda m: _wrap(m.GenerationMixin, "generate", "rollout"),
    "vllm.entrypoints.llm": lambda m: _watch_engine(m.LLM),
    "trl.generation.vllm_generation": lambda m: _wrap(m.VLLMGeneration, "sync_weights", "weight sync"),
    "deepspeed.runtime.engine": lambda m: _wrap(m.DeepSpeedEngine, "step", "optimizer"),
}
"""Hooks by module, run after its import."""
