"""Hooks on frameworks in a process on emulated cards: no uploads, phases of a step, shorter
rollouts.

Uploads to the Hugging Face hub are replaced by a line on stderr: `--push_to_hub` on the user's own
command line can't be overridden by an environment variable.

Phases are detected in functions that every framework calls, and reported to the emulated driver,
which keeps the peak of each: generation, the backward pass, the optimizer's step, the transfer of
weights to an engine, the start of vLLM's worker and its passes. Everything before is loading;
everything between is the forward pass and its surroundings. With each phase the process's title is
recorded, which names the role of Ray's and vLLM's processes.

In shorter rollouts a completion has its full length, and few of its tokens are decoded. Decoding is
what takes longest on emulated cards, a token at a time, and each token has the same memory but for
the cache of keys and values. With transformers, one decoded token stands for STRIDE: the cache
grows by as many positions. vLLM reserves its cache when it starts, so that it decodes STRIDE
tokens, and the last one is repeated. A generation of another form (a cache that is not plain,
scores in the answer, an older transformers) is left as it is.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

TRAINER_MODULE = "transformers.trainer"  # in a process that has imported it, a trainer runs
ROLLOUT_STRIDE = int(os.environ.get("AUTOTUNE_EMULATOR_STRIDE") or 1)

UPLOADS = (
    "create_repo",
    "create_branch",
    "create_tag",
    "create_commit",
    "upload_file",
    "upload_folder",
    "upload_large_folder",
    "preupload_lfs_files",
    "delete_repo",
    "update_repo_settings",
    "add_collection_item",
    "create_collection",
)
"""Methods of `HfApi` that change something on the hub."""

# 1. The hub.


def without_uploads(module: ModuleType) -> None:
    """Replace the methods in `huggingface_hub.hf_api`, and the functions that are bound to them."""
    for name in UPLOADS:
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, _stub(module, name))
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))


def _stub(module: ModuleType, name: str) -> Any:
    """Return a method that writes a line on stderr, and returns what the real one would."""

    def stub(api: Any, *args: Any, **kwargs: Any) -> Any:
        sys.stderr.write(f"autotune: {name} to the hub is off in a rehearsal\n")
        result = _upload_result(module, name, _repository(args, kwargs))
        if not kwargs.get("run_as_future"):
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    return stub


def _repository(args: Any, kwargs: Any) -> Any:
    if kwargs.get("repo_id"):
        return kwargs["repo_id"]
    if args and isinstance(args[0], str):
        return args[0]
    return "rehearsal/model"


def _upload_result(
    module: ModuleType,
    name: str,
    repository: Any,
) -> Any:
    address = f"https://huggingface.co/{repository}"
    if name == "create_repo":
        return module.RepoUrl(address)
    if name in ("create_commit", "upload_file", "upload_folder"):
        return module.CommitInfo(
            commit_url=f"{address}/commit/{'0' * 40}",
            commit_message="rehearsal",
            commit_description="",
            oid="0" * 40,
        )
    return None


# 2. Phases.

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


# 3. Shorter rollouts.


def shorten_transformers(generation: ModuleType) -> None:
    """Decode one of STRIDE tokens in `GenerationMixin.generate`."""
    import inspect

    import torch

    mixin = generation.GenerationMixin
    parameters = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    if "next_sequence_length" not in parameters:
        return  # its inputs are chosen by their position, which needs every id
    generate = mixin.generate
    update = mixin._update_model_kwargs_for_generation

    @functools.wraps(generate)
    def shortened(model: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        if not _can_be_shortened(config):
            return generate(model, *args, **kwargs)
        # 1. Fewer tokens.
        tokens = config.max_new_tokens
        short = copy.deepcopy(config)
        short.max_new_tokens = math.ceil(tokens / ROLLOUT_STRIDE)
        short.min_new_tokens = min(config.min_new_tokens or 0, short.max_new_tokens)
        model._emulated_stride = ROLLOUT_STRIDE
        try:
            ids = generate(model, *args, **{**kwargs, "generation_config": short})
        finally:
            del model._emulated_stride
        # 2. The full length.
        if ids.shape[1] < short.max_new_tokens:  # it ended by itself, at a special id
            return ids
        return torch.cat([ids, ids[:, -1:].expand(-1, tokens - short.max_new_tokens)], dim=1)

    @functools.wraps(update)
    def lengthened(model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        stride = getattr(model, "_emulated_stride", 1)
        cache = getattr(outputs, "past_key_values", None)
        if stride > 1 and _lengthen(cache, stride - 1):
            kwargs["num_new_tokens"] = stride
        return update(model, outputs, model_kwargs, *args, **kwargs)

    mixin.generate = shortened
    mixin._update_model_kwargs_for_generation = lengthened


def _can_be_shortened(config: Any) -> bool:
    tokens = getattr(config, "max_new_tokens", None)
    if not tokens or tokens <= ROLLOUT_STRIDE:
        return False
    return not config.return_dict_in_generate and config.use_cache is not False


def _lengthen(cache: Any, positions: int) -> bool:
    """Append positions to every layer of a plain cache; False if it is of another kind."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    import torch

    def longer(values: Any) -> Any:
        shape = (*values.shape[:-2], positions, values.shape[-1])
        return torch.cat([values, values[..., -1:, :].expand(shape)], dim=-2)

    for layer in layers:
        layer.keys, layer.values = longer(layer.keys), longer(layer.values)
    return True


def shorten_vllm(entrypoints: ModuleType) -> None:
    """Decode STRIDE tokens in `LLM.generate`, and repeat the last one."""
    engine = entrypoints.LLM
    generate = engine.generate

    @functools.wraps(generate)
    def shortened(
        llm: Any, prompts: Any = None, sampling_params: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        tokens = getattr(sampling_params, "max_tokens", None)
        if not tokens or tokens <= ROLLOUT_STRIDE:
            return generate(llm, prompts, sampling_params, *args, **kwargs)
        short = sampling_params.clone()
        short.max_tokens = ROLLOUT_STRIDE
        short.min_tokens = min(short.min_tokens or 0, ROLLOUT_STRIDE)
        answers = generate(llm, prompts, short, *args, **kwargs)
        for answer in answers:
            for output in answer.outputs:
                if len(output.token_ids) == ROLLOUT_STRIDE:
                    _lengthen_output(output, tokens, llm, short)
        return answers

    engine.generate = shortened


def _lengthen_output(
    output: Any,
    tokens: int,
    llm: Any,
    sampling: Any,
) -> None:
    output.token_ids = _repeated(output.token_ids, tokens)
    if output.logprobs is not None:
        output.logprobs = _repeated(output.logprobs, tokens)
    if output.text:  # what a framework counts that encodes the text again
        output.text = llm.get_tokenizer().decode(
            output.token_ids, skip_special_tokens=sampling.skip_special_tokens
        )


def _repeated(values: Any, length: int) -> Any:
    """Return the values with the last one repeated up to this length."""
    items = list(values)
    return items + items[-1:] * (length - len(items))


# 4. Tables.

HUB = {"huggingface_hub.hf_api": without_uploads}
ROLLOUTS = {
    "transformers.generation.utils": shorten_transformers,
    "vllm.entrypoints.llm": shorten_vllm,
}
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
"""Hooks by module, run after its import. A rollout's phase is outside the shorter rollout:
`emulator_start` adds PHASES last.
"""
