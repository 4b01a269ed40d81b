"""Phases of a step in a process on emulated cards, reported to the emulated driver.

Phases are detected in functions that every framework calls: generation, the backward pass, the
optimizer's step, the transfer of weights to an engine, the start of vLLM's worker and its passes.
Everything before is loading; everything between is the forward pass and its surroundings. The
driver keeps the peak of each. With each phase the process's title is recorded, which names the role
of Ray's and vLLM's processes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

TRAINER_MODULE = "transformers.trainer"  # in a process that has imported it, a trainer runs

_stack: list[str] = []
"""Phases whose functions are running, the innermost last."""
_torch: Any = None
_phase = _title = ""


def _report_phase(name: str) -> None:
    """Report to the emulated driver that this phase begins."""
    global _phase
    library = ctypes.CDLL(None)
    if not hasattr(library, "emu_phase"):
        return
    _phase = name
    _report_torch_peaks(library)
    _record_title()
    library.emu_phase(name.encode())


def _report_torch_peaks(library: Any) -> None:
    """Report torch's own peaks so far: a program may reset them at any time."""
    if _torch is None or not _torch.cuda.is_initialized():
        return
    device = _torch.cuda.current_device()
    allocated = _torch.cuda.max_memory_allocated(device)
    reserved = _torch.cuda.max_memory_reserved(device)
    library.emu_note_torch(device, ctypes.c_int64(allocated), ctypes.c_int64(reserved))


def _record_title() -> None:
    """Record the title that Ray or vLLM gave this process, like `ray::WorkerDict.update_actor`."""
    global _title
    with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
        title = file.read(100).split(b"\0")[0].decode(errors="replace")
    folder = os.environ.get("AUTOTUNE_EMULATOR_REPORT")
    if "::" in title and title != _title and folder is not None:
        _title = title
        path = os.path.join(folder, f"{os.getpid()}.title")  # noqa: PTH118
        with open(path, "w") as file:  # noqa: PTH123
            file.write(title)


def _within(
    phase: str,
    method: Callable[..., Any],
    after: str | None = "forward",
) -> Callable[..., Any]:
    """Return the method as a phase; `after`: the phase after an outermost one, None: the phase
    before it.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        next_phase = _stack[-1] if _stack else after or _phase
        _stack.append(phase)
        _report_phase(phase)
        try:
            return method(*args, **kwargs)
        finally:
            _stack.pop()
            _report_phase(next_phase)

    return run


def _wrap(
    owner: Any,
    phase: str,
    *names: str,
    after: str | None = "forward",
) -> None:
    for name in names:
        if owner is not None and hasattr(owner, name):
            setattr(owner, name, _within(phase, getattr(owner, name), after))


def watch_torch(torch: ModuleType) -> None:
    global _torch
    _torch = torch
    _report_phase("load")
    _watch_first_forward()
    _wrap(torch.autograd, "backward", "backward")
    from torch.optim import optimizer

    profile_hook_step = optimizer.Optimizer.profile_hook_step

    def hook_step(method: Callable[..., Any]) -> Callable[..., Any]:
        hooked: Callable[..., Any] = profile_hook_step(_within("optimizer", method))
        return hooked

    optimizer.Optimizer.profile_hook_step = staticmethod(hook_step)
    atexit.register(lambda: _report_phase("end"))


def _watch_first_forward() -> None:
    """End the loading of a plain loop with the first call of a model that is in training, which
    no framework announces.
    """
    from torch.nn.modules import module as modules

    def begin(called: Any, _: Any) -> None:
        if not called.training or not _torch.is_grad_enabled():
            return
        handle.remove()
        if _phase == "load" and not _stack:
            _report_phase("forward")

    handle = modules.register_module_forward_pre_hook(begin)


def _watch_engine(engine: Any) -> None:
    _wrap(engine, "engine start", "__init__")
    _wrap(engine, "rollout", "generate")


def _watch_worker(worker: Any) -> None:
    """Watch vLLM's worker, which has a process of its own unless the trainer runs it."""
    starts = (
        "load_model",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "determine_num_available_blocks",
        "initialize_cache",
        "_init_cache_engine",
    )
    _load_engine_kernels(worker)
    _wrap(worker, "engine start", *starts, after=None)
    _wrap(worker, "rollout", "execute_model", after=None)


def _load_engine_kernels(worker: Any) -> None:
    """Charge an engine's own kernels while it profiles in a trainer's process, whose kernels are
    there before.
    """
    profile = getattr(worker, "determine_available_memory", None)
    if profile is None:
        return

    @functools.wraps(profile)
    def run(*args: Any, **kwargs: Any) -> Any:
        if TRAINER_MODULE in sys.modules:
            ctypes.CDLL(None).emu_engine_kernels()
        return profile(*args, **kwargs)

    worker.determine_available_memory = run


def _watch_deepspeed(engine: Any) -> None:
    """Watch DeepSpeed's engine. When it is made, a Ray worker has its actor's title, which it had
    not when torch was imported.
    """
    init_of_deepspeed = engine.__init__

    @functools.wraps(init_of_deepspeed)
    def init(*args: Any, **kwargs: Any) -> None:
        init_of_deepspeed(*args, **kwargs)
        _report_phase(_phase)

    engine.__init__ = init
    _wrap(engine, "optimizer", "step")


PHASE_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "torch": watch_torch,
    "transformers.generation.utils": lambda module: _wrap(
        module.GenerationMixin, "rollout", "generate"
    ),
    "transformers.trainer": lambda module: _wrap(module.Trainer, "forward", "training_step"),
    "vllm.entrypoints.llm": lambda module: _watch_engine(module.LLM),
    "vllm.v1.worker.gpu_worker": lambda module: _watch_worker(module.Worker),
    "vllm.worker.worker": lambda module: _watch_worker(module.Worker),
    "trl.generation.vllm_generation": lambda module: _wrap(
        module.VLLMGeneration, "weight sync", "sync_weights"
    ),
    "deepspeed.runtime.engine": lambda module: _watch_deepspeed(module.DeepSpeedEngine),
    # Ray copies an actor's methods while `orz.ppo.actors` is imported; these are called by them.
    "orz.exp_engine.parallels.orz_distributed_c10d": lambda module: _wrap(
        module.CUDAIPCHandle, "weight sync", "from_tensor", after=None
    ),
    "orz.exp_engine.accelerators.inference.vllm_worker_wrap": lambda module: _wrap(
        module.WorkerWrap,
        "weight sync",
        "update_weight",
        "update_weight_internal_with_cuda_ipc",
        after=None,
    ),
}
"""Hooks by module, run after its import."""
