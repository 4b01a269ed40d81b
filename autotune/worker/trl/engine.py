"""vLLM beside the training: one engine for all candidates of a load.

TRL builds an engine in each trainer. A factory replaces the class it uses, and returns the existing engine for equal
arguments. Other arguments replace the engine.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import process_memory, synthetic
from . import base_model
from .seams import GENERATION, GRPO, RLOO

# The engine shares its process with the trainer: it must not bind the trainer's threads to cores, or send usage data.
QUIET: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_vllm() -> None:
    """Make TRL skip its import of vLLM, which takes ten seconds."""
    utilities: Any = importlib.import_module("trl.import_utils")
    if not hasattr(utilities, "real_is_vllm_available"):
        utilities.real_is_vllm_available = utilities.is_vllm_available
        utilities.is_vllm_available = lambda *_, **__: False


def with_vllm() -> Any:
    """Return TRL's generation module with vLLM, also after an import without it."""
    utilities: Any = importlib.import_module("trl.import_utils")
    importlib.import_module(GRPO)
    generation = importlib.import_module(GENERATION)
    if hasattr(utilities, "real_is_vllm_available"):
        utilities.is_vllm_available = utilities.real_is_vllm_available
        del utilities.real_is_vllm_available
        generation = importlib.reload(generation)
        for module in (sys.modules[name] for name in (GRPO, RLOO) if name in sys.modules):
            vars(module).update(VLLMGeneration=generation.VLLMGeneration, is_vllm_available=utilities.is_vllm_available)
    if not hasattr(generation, "LLM"):
        raise ImportError("generation by vLLM was asked for, and this environment has no vLLM.")
    return generation


def prepare_environment(*, cpu: bool) -> None:
    """Set the variables that vLLM reads once, at its import."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if cpu:
        # Even in eager mode, vLLM compiles helpers of its sampler: half a minute of C++ compilation for microseconds.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if "torch._dynamo.config" in sys.modules:
            sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


class Engines:
    """The current engine, and the factory that replaces vLLM's class."""

    def __init__(self, recorder: Any, *, cpu: bool, random_weights: bool) -> None:
        self.recorder = recorder
        self._cpu, self._random = cpu, random_weights
        self._key: str | None = None
        self._engine: Any = None
        self.arguments: dict[str, Any] = {}

    def install(self, generation: Any) -> None:
        """Replace `LLM` in TRL's generation module by the factory."""
        self._real = getattr(generation.LLM, "real", generation.LLM)
        if self._cpu:
            import torch
            import vllm.model_executor.layers.utils as utils

            def plain(layer: Any, remove_weight: bool) -> None:
                layer.cpu_linear = torch.nn.functional.linear

            utils.dispatch_cpu_unquantized_gemm = plain  # repacked linears lose the loader that weight sync uses

        def factory(**arguments: Any) -> Any:
            return self.get(arguments)

        factory.real = self._real  # type: ignore[attr-defined]
        generation.LLM = factory

    def get(self, arguments: dict[str, Any]) -> Any:
        """Return the engine with these arguments, and build it if necessary."""
        whole = dict(arguments)
        if self._random and whole.get("quantization") == "bitsandbytes":
            write_checkpoint(Path(whole["model"]), trust_remote_code=bool(whole.get("trust_remote_code")))
        elif self._random:
            whole["load_format"] = "dummy"  # sufficient: the trainer pushes its weights before the first generation
        if self._cpu:
            whole["enforce_eager"] = True
        key = json.dumps({name: str(value) for name, value in sorted(whole.items())})
        if key != self._key:
            if self._engine is not None:  # the load froze it, so that the collector has to include frozen objects
                self._engine = self._key = None
                gc.unfreeze()
                gc.collect()
            with self.recorder.inside("load"):
                self._engine = self._build(whole)
            self._key, self.arguments = key, whole
            return self._engine
        # Requests of a failed generation are aborted: the next one would continue them.
        unfinished = list(getattr(self._engine.llm_engine.output_processor, "request_states", ()))
        if unfinished:
            self._engine.llm_engine.abort_request(unfinished)
        if arguments.get("enable_sleep_mode") and self._engine.llm_engine.is_sleeping():
            self._engine.wake_up()  # TRL puts a new engine to sleep at once, which fails for one that sleeps already
        return self._engine

    def _build(self, arguments: dict[str, Any]) -> Any:
        from ..tracing.patching import attribute

        if self._cpu and self.recorder.limit_bytes is not None:
            use_limit_as_machine(self.recorder.limit_bytes)
        # vLLM's share refers to the whole device. On a part of it that emulates a smaller card, it has to refer to that part.
        scale = self.recorder.device.get("engine_share_scale", 1.0)
        if scale != 1.0:
            arguments = {**arguments, "gpu_memory_utilization": arguments["gpu_memory_utilization"] * scale}
        # vLLM freezes the heap after its start: the trainer under construction would never be collected.
        with attribute(gc, "freeze", lambda: None), ranks_restored():
            return self._real(**arguments)


def write_checkpoint(folder: Path, *, trust_remote_code: bool) -> None:
    """Write zeros where vLLM's loader for bitsandbytes finds no weights: it quantises what it reads from a file."""
    from transformers import AutoConfig

    if any(folder.glob("*.safetensors")):
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    wanted = {"dtype": str(config.dtype or "bfloat16").removeprefix("torch.")}
    model = base_model.without_values(lambda: base_model.random_model(wanted, config, trust_remote_code))
    synthetic.write_zero_weights(folder, model)


def install(loaded: Any, recorder: Any) -> Any:
    """Give the load a factory of engines, and return TRL's generation module, which uses it."""
    cpu = loaded.device == "cpu"
    prepare_environment(cpu=cpu)
    generation = with_vllm()
    loaded.engines = Engines(recorder, cpu=cpu, random_weights=loaded.request["model"]["weights"] == "random")
    loaded.engines.install(generation)
    return generation


def start(loaded: Any, recorder: Any) -> None:
    """Build the engine with TRL's own code, so that the first trainer finds it ready."""
    from accelerate import Accelerator

    generation, wanted = install(loaded, recorder), loaded.request["engine"]
    known = inspect.signature(generation.VLLMGeneration.__init__).parameters
    with ranks_restored():
        arguments = {
            "model": loaded.model,
            "accelerator": Accelerator(cpu=loaded.device == "cpu"),
            "is_fsdp_enabled": False,
            "processing_class": loaded.tokenizer,
            "mode": "colocate",
            "tensor_parallel_size": wanted.get("vllm_tensor_parallel_size") or 1,
            "gpu_memory_utilization": wanted["vllm_gpu_memory_utilization"],
            "max_model_length": wanted["vllm_max_model_length"],
            "max_num_seqs": wanted["max_num_seqs"],
            "enable_sleep_mode": bool(wanted.get("vllm_enable_sleep_mode")),
            "model_impl": wanted.get("vllm_model_impl") or "vllm",
            "trust_remote_code": bool(loaded.request.get("trust_remote_code")),
        }
        generation.VLLMGeneration(**{name: value for name, value in arguments.items() if name in known})


@contextmanager
def ranks_restored() -> Iterator[None]:
    """Undo TRL's variables for a single process: the next trainer would assume several."""
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def use_limit_as_machine(limit_bytes: int) -> None:
    """Make vLLM's utilisation a share of the probe's limit instead of the machine's memory.

    vLLM reads the limit of the root control group only. Memory is counted as the limit counts it, without library pages.
    """
    import vllm.v1.worker.cpu_worker as worker

    held = process_memory.own_bytes

    def node(*_: Any) -> Any:
        return SimpleNamespace(total_memory=limit_bytes, available_memory=max(0, limit_bytes - held()))

    worker.get_memory_node_info = node
    worker.psutil = SimpleNamespace(Process=lambda *_: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=held())))
