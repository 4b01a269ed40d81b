"""vLLM beside the training: one engine for all candidates of a load, and what a CPU needs for it.

TRL builds an engine inside every trainer. Here the name it builds by is replaced by one that hands back the engine that was
built with the same arguments; other arguments get another engine, in the old one's place.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..memory import resident

QUIET: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""The engine shares its process with the trainer: it must not bind the trainer's threads to cores, nor call home."""

RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prepare_environment(*, cpu: bool) -> None:
    """Before vLLM is imported, which reads these once."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if cpu:
        # Even when told to run eagerly, vLLM compiles helpers of its sampler: half a minute of C++ compiler for microseconds.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if "torch._dynamo.config" in sys.modules:
            sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


class Engines:
    """The one engine that is alive, and the stand-in for vLLM's own class."""

    def __init__(self, stage: Any, *, cpu: bool, random_weights: bool) -> None:
        self.stage = stage
        self._cpu = cpu
        self._random = random_weights
        self._key: str | None = None
        self._engine: Any = None
        self.arguments: dict[str, Any] = {}

    def install(self, generation: Any) -> None:
        """Put the stand-in where TRL looks for vLLM's LLM."""
        self._real = getattr(generation.LLM, "real", generation.LLM)
        if self._cpu:
            keep_plain_linears()

        def stand_in(**arguments: Any) -> Any:
            return self.get(arguments)

        stand_in.real = self._real  # type: ignore[attr-defined]
        generation.LLM = stand_in

    def get(self, arguments: dict[str, Any]) -> Any:
        """The engine of these arguments, built now if it is not there."""
        whole = {**arguments, **self._ours()}
        key = json.dumps({name: str(value) for name, value in sorted(whole.items())})
        if key != self._key:
            self.close()
            with self.stage.inside("load"):
                self._engine = self._build(whole)
            self._key, self.arguments = key, whole
        else:
            forget_unfinished(self._engine)
            if arguments.get("enable_sleep_mode") and self._engine.llm_engine.is_sleeping():
                # TRL puts a new engine to sleep at once, and one that sleeps must not be put to sleep again.
                self._engine.wake_up()
        return self._engine

    def _ours(self) -> dict[str, Any]:
        # Dummy weights do: the trainer pushes its own before the first generation.
        ours: dict[str, Any] = {"load_format": "dummy"} if self._random else {}
        return ours | ({"enforce_eager": True} if self._cpu else {})

    def _build(self, arguments: dict[str, Any]) -> Any:
        if self._cpu and self.stage.limit_bytes is not None:
            limit_is_the_machine(self.stage.limit_bytes)
        arguments = self._with_its_share(arguments)
        before, freeze = rendezvous(), gc.freeze
        # vLLM freezes the heap once it is up; the trainer under construction would be frozen along and never be collected.
        gc.freeze = lambda: None
        try:
            return self._real(**arguments)
        finally:
            gc.freeze = freeze
            restore(before)

    def _with_its_share(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """vLLM's share is of all that the device has. Where a part of it stands for a smaller card, it is of that part."""
        scale = self.stage.device.get("engine_share_scale", 1.0)
        return {**arguments, "gpu_memory_utilization": arguments["gpu_memory_utilization"] * scale} if scale != 1.0 else arguments

    def close(self) -> None:
        """Let go of the engine. The load froze it with all else that stays, so the collector must look there again."""
        if self._engine is not None:
            self._engine = self._key = None
            gc.unfreeze()
            gc.collect()


def forget_unfinished(engine: Any) -> None:
    """A generation that failed leaves its requests behind, which the next one would go on with."""
    unfinished = list(getattr(engine.llm_engine.output_processor, "request_states", ()))
    if unfinished:
        engine.llm_engine.abort_request(unfinished)


def start(generation: Any, model: Any, tokenizer: Any, request: Mapping[str, Any], *, cpu: bool) -> None:
    """Build the engine as TRL itself would, so that the first trainer finds it ready."""
    from accelerate import Accelerator

    engine = request["engine"]
    before = rendezvous()
    accelerator = Accelerator(cpu=cpu)
    wanted = {
        "model": model,
        "accelerator": accelerator,
        "is_fsdp_enabled": False,
        "processing_class": tokenizer,
        "mode": "colocate",
        "tensor_parallel_size": engine.get("vllm_tensor_parallel_size") or 1,
        "gpu_memory_utilization": engine["vllm_gpu_memory_utilization"],
        "max_model_length": engine["vllm_max_model_length"],
        "max_num_seqs": engine["max_num_seqs"],
        "enable_sleep_mode": bool(engine.get("vllm_enable_sleep_mode")),
        "model_impl": engine.get("vllm_model_impl") or "vllm",
        "trust_remote_code": bool(request.get("trust_remote_code")),
    }
    known = inspect.signature(generation.VLLMGeneration.__init__).parameters
    try:
        generation.VLLMGeneration(**{name: value for name, value in wanted.items() if name in known})
    finally:
        restore(before)


def rendezvous() -> dict[str, str | None]:
    """What the environment says about the ranks."""
    return {name: os.environ.get(name) for name in RENDEZVOUS}


def restore(before: Mapping[str, str | None]) -> None:
    """TRL writes a single process's rank into the environment, where the next trainer would take it for a distributed run."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def keep_plain_linears() -> None:
    """vLLM's CPU linears repack their weights and drop the loader that weight sync goes through: keep them as they are."""
    import torch
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def limit_is_the_machine(limit_bytes: int) -> None:
    """On a CPU the utilisation knob is a share of the machine's memory, minus what the process holds.

    vLLM reads the limit of the root control group only. The probe's own limit is the machine here, whatever enforces it, and
    what counts against it is what the limit counts: not the pages of the libraries.
    """
    import vllm.v1.worker.cpu_worker as worker

    def held() -> int:
        figures = resident()
        return figures["RssAnon"] + figures["RssShmem"]

    def node(*_: Any) -> Any:
        return SimpleNamespace(total_memory=limit_bytes, available_memory=max(0, limit_bytes - held()))

    worker.get_memory_node_info = node
    worker.psutil = SimpleNamespace(Process=lambda *_: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=held())))
