"""Phases of a step, reported to the emulated driver, which keeps the peak of each.

They are detected in functions that every framework calls: generation, the backward pass, the
optimizer's step, the transfer of weights to an engine, the start of vLLM's worker and its passes.
Everything before is loading; everything between is the forward pass and its surroundings. With each
phase the process's title is recorded, which names the role of Ray's and vLLM's processes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

_stack: list[str] = []
_torch: Any = None
_phase = _title = ""


def _tell(name: str) -> None:
    global _phase, _title
    library = ctypes.CDLL(None)
    if not hasattr(library, "emu_phase"):
        return
    _phase = name
    # 1. Torch's own peaks so far: a program may reset them at any time.
    if _torch is not None and _torch.cuda.is_initialized():
        device = _torch.cuda.current_device()
        allocated, reserved = _torch.cuda.max_memory_allocated(device), _torch.cuda.max_memory_reserved(device)
        library.emu_note_torch(device, ctypes.c_int64(allocated), ctypes.c_int64(reserved))
    # 2. The title that Ray or vLLM gave this process, like `ray::WorkerDict.update_actor`.
    with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
        title = file.read(100).split(b"\0")[0].decode(errors="replace")
    folder = os.environ.get("AUTOTUNE_EMULATOR_REPORT")
    if "::" in title and title != _title and folder is not None:
        _title = title
        with open(os.path.join(folder, f"{os.getpid()}.title"), "w") as file:  # noqa: PTH118, PTH123
            file.write(title)
    # 3. The phase
    library.emu_phase(name.encode())


def _within(phase: str, method: Callable[..., Any], after: str | None = "forward") -> Callable[..., Any]:
    """Return the method as a phase; an outermost one is followed by `after`, None: by the phase before it."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        following = _stack[-1] if _stack else after or _phase
        _stack.append(phase)
        _tell(phase)
        try:
            return method(*args, **kwargs)
        finally:
            _stack.pop()
            _tell(following)

    return called


def _wrap(owner: Any, phase: str, *names: str, after: str | None = "forward") -> None:
    for name in names:
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, _within(phase, getattr(owner, name), after))


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
    _wrap(engine, "engine start", "__init__")
    _wrap(engine, "rollout", "generate")


def _watch_worker(worker: Any) -> None:
    """vLLM's worker, which has a process of its own unless the trainer runs it."""
    starts = ("load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model",
              "determine_num_available_blocks", "initialize_cache", "_init_cache_engine")  # fmt: skip
    _wrap(worker, "engine start", *starts, after=None)
    _wrap(worker, "rollout", "execute_model", after=None)


def _watch_deepspeed(engine: Any) -> None:
    """A Ray worker has its actor's title by then, and had none when torch was imported."""
    made = engine.__init__

    @functools.wraps(made)
    def init(*args: Any, **kwargs: Any) -> None:
        made(*args, **kwargs)
        _tell(_phase)

    engine.__init__ = init
    _wrap(engine, "optimizer", "step")


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "transformers.generation.utils": lambda m: _wrap(m.GenerationMixin, "rollout", "generate"),
    "transformers.trainer": lambda m: _wrap(m.Trainer, "forward", "training_step"),
    "vllm.entrypoints.llm": lambda m: _watch_engine(m.LLM),
    "vllm.v1.worker.gpu_worker": lambda m: _watch_worker(m.Worker),
    "vllm.worker.worker": lambda m: _watch_worker(m.Worker),
    "trl.generation.vllm_generation": lambda m: _wrap(m.VLLMGeneration, "weight sync", "sync_weights"),
    "deepspeed.runtime.engine": lambda m: _watch_deepspeed(m.DeepSpeedEngine),
    # Ray copies an actor's methods while `orz.ppo.actors` is imported; these are called by them.
    "orz.exp_engine.parallels.orz_distributed_c10d": lambda m: _wrap(m.CUDAIPCHandle, "weight sync", "from_tensor", after=None),
    "orz.exp_engine.accelerators.inference.vllm_worker_wrap": lambda m: _wrap(
        m.WorkerWrap, "weight sync", "update_weight", "update_weight_internal_with_cuda_ipc", after=None
    ),
}
"""Hooks by module, run after its import."""
