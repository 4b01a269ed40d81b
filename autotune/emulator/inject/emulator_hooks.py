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
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

STRIDE = int(os.environ.get("AUTOTUNE_EMULATOR_STRIDE") or 1)

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


def without_uploads(module: ModuleType) -> None:
    """Replace the methods in `huggingface_hub.hf_api`, and the functions that are bound to them."""
    for name in UPLOADS:
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, _stub(module, name))
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))


def _stub(module: ModuleType, name: str) -> Any:
    def stub(api: Any, *words: Any, **named: Any) -> Any:
        repository = named.get("repo_id") or (
            words[0] if words and isinstance(words[0], str) else "rehearsal/model"
        )
        sys.stderr.write(f"autotune: {name} to the hub is off in a rehearsal\n")
        address = f"https://huggingface.co/{repository}"
        result: Any = None
        if name == "create_repo":
            result = module.RepoUrl(address)
        elif name in ("create_commit", "upload_file", "upload_folder"):
            result = module.CommitInfo(
                commit_url=f"{address}/commit/{'0' * 40}",
                commit_message="rehearsal",
                commit_description="",
                oid="0" * 40,
            )
        if not named.get("run_as_future"):
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    return stub


# Phases.

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
        allocated, reserved = (
            _torch.cuda.max_memory_allocated(device),
            _torch.cuda.max_memory_reserved(device),
        )
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


def _within(
    phase: str, method: Callable[..., Any], after: str | None = "forward"
) -> Callable[..., Any]:
    """Return the method as a phase; an outermost one is followed by `after`, None: by the phase
    before it.
    """

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
    starts = (
        "load_model",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "determine_num_available_blocks",
        "initialize_cache",
        "_init_cache_engine",
    )
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


# Shorter rollouts.


def shorten_transformers(generation: ModuleType) -> None:
    """Decode one of STRIDE tokens in `GenerationMixin.generate`."""
    import inspect

    import torch

    mixin = generation.GenerationMixin
    if (
        "next_sequence_length"
        not in inspect.signature(mixin.prepare_inputs_for_generation).parameters
    ):
        return  # its inputs are chosen by their position, which needs every id
    generate, update = mixin.generate, mixin._update_model_kwargs_for_generation

    @functools.wraps(generate)
    def shortened(model: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = kwargs.get("generation_config")
        tokens = getattr(config, "max_new_tokens", None)
        if (
            not tokens
            or tokens <= STRIDE
            or config.return_dict_in_generate
            or config.use_cache is False
        ):
            return generate(model, *args, **kwargs)
        short = copy.deepcopy(config)
        short.max_new_tokens = -(-tokens // STRIDE)
        short.min_new_tokens = min(config.min_new_tokens or 0, short.max_new_tokens)
        model._emulated_stride = STRIDE
        try:
            ids = generate(model, *args, **{**kwargs, "generation_config": short})
        finally:
            del model._emulated_stride
        if ids.shape[1] < short.max_new_tokens:  # it ended by itself, at a special id
            return ids
        return torch.cat([ids, ids[:, -1:].expand(-1, tokens - short.max_new_tokens)], dim=1)

    @functools.wraps(update)
    def lengthened(model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        stride = getattr(model, "_emulated_stride", 1)
        if stride == 1 or not _lengthen(getattr(outputs, "past_key_values", None), stride - 1):
            return update(model, outputs, model_kwargs, *args, **kwargs)
        return update(model, outputs, model_kwargs, *args, **{**kwargs, "num_new_tokens": stride})

    mixin.generate, mixin._update_model_kwargs_for_generation = shortened, lengthened


def _lengthen(cache: Any, positions: int) -> bool:
    """Append positions to every layer of a plain cache; False if it is of another kind."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    import torch

    for layer in layers:
        layer.keys, layer.values = (
            torch.cat(
                [held, held[..., -1:, :].expand(*held.shape[:-2], positions, held.shape[-1])],
                dim=-2,
            )
            for held in (layer.keys, layer.values)
        )
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
        if not tokens or tokens <= STRIDE:
            return generate(llm, prompts, sampling_params, *args, **kwargs)
        short = sampling_params.clone()
        short.max_tokens, short.min_tokens = STRIDE, min(short.min_tokens or 0, STRIDE)
        answers = generate(llm, prompts, short, *args, **kwargs)
        for output in (output for answer in answers for output in answer.outputs):
            if len(output.token_ids) != STRIDE:
                continue
            output.token_ids = _repeated(output.token_ids, tokens)
            output.logprobs = (
                None if output.logprobs is None else _repeated(output.logprobs, tokens)
            )
            if output.text:  # what a framework counts that encodes the text again
                output.text = llm.get_tokenizer().decode(
                    output.token_ids, skip_special_tokens=short.skip_special_tokens
                )
        return answers

    engine.generate = shortened


def _repeated(values: Any, length: int) -> Any:
    listed = list(values)
    return listed + listed[-1:] * (length - len(listed))


HUB = {"huggingface_hub.hf_api": without_uploads}
ROLLOUTS = {
    "transformers.generation.utils": shorten_transformers,
    "vllm.entrypoints.llm": shorten_vllm,
}
PHASES: dict[str, Callable[[ModuleType], None]] = {
    "torch": watch_torch,
    "transformers.generation.utils": lambda m: _wrap(m.GenerationMixin, "rollout", "generate"),
    "transformers.trainer": lambda m: _wrap(m.Trainer, "forward", "training_step"),
    "vllm.entrypoints.llm": lambda m: _watch_engine(m.LLM),
    "vllm.v1.worker.gpu_worker": lambda m: _watch_worker(m.Worker),
    "vllm.worker.worker": lambda m: _watch_worker(m.Worker),
    "trl.generation.vllm_generation": lambda m: _wrap(
        m.VLLMGeneration, "weight sync", "sync_weights"
    ),
    "deepspeed.runtime.engine": lambda m: _watch_deepspeed(m.DeepSpeedEngine),
    # Ray copies an actor's methods while `orz.ppo.actors` is imported; these are called by them.
    "orz.exp_engine.parallels.orz_distributed_c10d": lambda m: _wrap(
        m.CUDAIPCHandle, "weight sync", "from_tensor", after=None
    ),
    "orz.exp_engine.accelerators.inference.vllm_worker_wrap": lambda m: _wrap(
        m.WorkerWrap,
        "weight sync",
        "update_weight",
        "update_weight_internal_with_cuda_ipc",
        after=None,
    ),
}
"""Hooks by module, run after its import. A rollout's phase is outside the shorter rollout:
`emulator_start` adds PHASES last.
"""
