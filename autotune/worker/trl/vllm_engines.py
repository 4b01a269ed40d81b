"""vLLM beside the training: one engine in the trainer's process, or one server, for all candidates
of a load.

TRL builds an engine in each trainer. A factory replaces the class it uses, and returns the existing
engine for equal arguments. Other arguments replace the engine.

A server has the GPUs that the trainer leaves free. The first rank starts TRL's own script, as
launch.sh starts it for the final run, and ends it. The client connection that updates its weights
stays as well; TRL would open one per trainer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import process_memory, processes, synthetic
from ..protocol import Arguments, Request
from ..rank import free_port
from . import base_model
from .seams import GENERATION, GRPO, RLOO

# The engine shares its process with the trainer: it must not bind the trainer's threads to cores,
# or send usage data.
QUIET_ENGINE: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOST = "127.0.0.1"
ENGINE_POLL_S = 0.25
ENGINE_TAIL_BYTES = 4096
# Prefixes of variables about the trainer's ranks, which must not reach the server.
TRAINER_VARIABLES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")


# TRL's modules with and without vLLM.


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
        for name in (GRPO, RLOO):
            if name in sys.modules:
                trainer_module: Any = sys.modules[name]
                trainer_module.VLLMGeneration = generation.VLLMGeneration
                trainer_module.is_vllm_available = utilities.is_vllm_available
    if not hasattr(generation, "LLM"):
        raise ImportError("generation by vLLM was asked for, and this environment has no vLLM.")
    return generation


def prepare_environment(*, cpu: bool) -> None:
    """Set the variables that vLLM reads once, at its import."""
    for name, value in QUIET_ENGINE.items():
        os.environ.setdefault(name, value)
    if cpu:
        # Even in eager mode, vLLM compiles helpers of its sampler: half a minute of C++ compilation
        # for microseconds.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if "torch._dynamo.config" in sys.modules:
            sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def ranks_restored() -> Iterator[None]:
    """Undo TRL's variables for a single process: the next trainer would assume several."""
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    # TRL tries the same few ports first: two runs that start at once would take the same one.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# One engine in the trainer's process.


class Engines:
    """The current engine, and the factory that replaces vLLM's class."""

    def __init__(
        self,
        recorder: Any,
        *,
        cpu: bool,
        random_weights: bool,
    ) -> None:
        self.recorder = recorder
        self._cpu = cpu
        self._random = random_weights
        self._key: str | None = None  # arguments of the current engine
        self._engine: Any = None
        self.arguments: Arguments = {}

    def install(self, generation: Any) -> None:
        """Replace `LLM` in TRL's generation module by the factory."""
        self._real = getattr(generation.LLM, "real", generation.LLM)
        if self._cpu:
            _keep_linears_plain()
        factory: Any = lambda **arguments: self.get(arguments)  # noqa: E731
        factory.real = self._real
        generation.LLM = factory

    def get(self, arguments: Arguments) -> Any:
        """Return the engine with these arguments, and build it if necessary."""
        completed = self._completed(arguments)
        values = {name: str(value) for name, value in completed.items()}
        key = json.dumps(values, sort_keys=True)
        if key != self._key:
            if self._engine is not None:
                self._free()
            with self.recorder.inside("load"):
                self._engine = self._build(completed)
            self._key = key
            self.arguments = completed
            return self._engine
        # Requests of a failed generation are aborted: the next one would continue them.
        engine = self._engine.llm_engine
        states = getattr(engine.output_processor, "request_states", ())
        unfinished = list(states)
        if unfinished:
            engine.abort_request(unfinished)
        if arguments.get("enable_sleep_mode") and engine.is_sleeping():
            # TRL puts a new engine to sleep at once, which fails for one that sleeps already
            self._engine.wake_up()
        return self._engine

    def _completed(self, arguments: Arguments) -> Arguments:
        """Return the arguments with those for random weights and for a CPU."""
        completed = dict(arguments)
        if self._random:
            if completed.get("quantization") == "bitsandbytes":
                trust = bool(completed.get("trust_remote_code"))
                write_checkpoint(Path(completed["model"]), trust_remote_code=trust)
            else:
                # Sufficient: the trainer pushes its weights before the first generation.
                completed["load_format"] = "dummy"
        if self._cpu:
            completed["enforce_eager"] = True
        return completed

    def _free(self) -> None:
        """Free the engine. The load froze it, so the collector has to include frozen objects."""
        self._engine = self._key = None
        gc.unfreeze()
        gc.collect()

    def _build(self, arguments: Arguments) -> Any:
        from ..tracing.patching import attribute

        if self._cpu and self.recorder.limit_bytes is not None:
            use_limit_as_machine(self.recorder.limit_bytes)
        # vLLM's share refers to the whole device. On a part of it that emulates a smaller card, it
        # has to refer to that part.
        scale = self.recorder.device.get("engine_share_scale", 1.0)
        if scale != 1.0:
            share = arguments["gpu_memory_utilization"] * scale
            arguments = {**arguments, "gpu_memory_utilization": share}
        # vLLM freezes the heap after its start: the trainer under construction would never be
        # collected.
        with attribute(gc, "freeze", lambda: None), ranks_restored():
            return self._real(**arguments)


def _keep_linears_plain() -> None:
    """Keep vLLM from repacking linear layers on a CPU.

    Repacked ones lose the loader that weight sync uses.
    """
    import torch
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def write_checkpoint(folder: Path, *, trust_remote_code: bool) -> None:
    """Write zeros where vLLM's loader for bitsandbytes finds no weights.

    It quantises what it reads from a file.
    """
    from transformers import AutoConfig

    if any(folder.glob("*.safetensors")):
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    dtype = str(config.dtype or "bfloat16").removeprefix("torch.")
    model = base_model.without_values(
        lambda: base_model.random_model({"dtype": dtype}, config, trust_remote_code)
    )
    synthetic.write_zero_weights(folder, model)


def use_limit_as_machine(limit_bytes: int) -> None:
    """Make vLLM's utilisation a share of the probe's limit instead of the machine's memory.

    vLLM reads the limit of the root control group only. Memory is counted as the limit counts it,
    without library pages.
    """
    import vllm.v1.worker.cpu_worker as worker

    used_bytes = process_memory.own_bytes

    def memory_node(*_: Any) -> Any:
        available = max(0, limit_bytes - used_bytes())
        return SimpleNamespace(total_memory=limit_bytes, available_memory=available)

    def process(*_: Any) -> Any:
        return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=used_bytes()))

    worker.get_memory_node_info = memory_node
    worker.psutil = SimpleNamespace(Process=process)


def install(loaded: Any, recorder: Any) -> Any:
    """Give the load a factory of engines, and return TRL's generation module, which uses it."""
    cpu = loaded.device == "cpu"
    prepare_environment(cpu=cpu)
    generation = with_vllm()
    random_weights = loaded.request["model"]["weights"] == "random"
    loaded.engines = Engines(recorder, cpu=cpu, random_weights=random_weights)
    loaded.engines.install(generation)
    return generation


def start_engine(loaded: Any, recorder: Any) -> None:
    """Build the engine with TRL's own code, so that the first trainer finds it ready."""
    from accelerate import Accelerator

    generation_class = install(loaded, recorder).VLLMGeneration
    settings = loaded.request["engine"]
    with ranks_restored():
        arguments = {
            "model": loaded.model,
            "accelerator": Accelerator(cpu=loaded.device == "cpu"),
            "is_fsdp_enabled": False,
            "processing_class": loaded.tokenizer,
            "mode": "colocate",
            "max_num_seqs": settings["max_num_seqs"],
            "tensor_parallel_size": settings.get("vllm_tensor_parallel_size") or 1,
            "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
            "max_model_length": settings["vllm_max_model_length"],
            "enable_sleep_mode": bool(settings.get("vllm_enable_sleep_mode")),
            "model_impl": settings.get("vllm_model_impl") or "vllm",
            "trust_remote_code": bool(loaded.request.get("trust_remote_code")),
        }
        parameters = inspect.signature(generation_class.__init__).parameters
        for name in arguments.keys() - parameters.keys():  # unknown to this release
            del arguments[name]
        generation_class(**arguments)


# One server.


class ServerEnded(RuntimeError):
    """The server exited during its start; the message contains its last output."""


class Server:
    """vLLM server, and the client that all trainers share."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        port: int,
        environment: Mapping[str, str],
    ) -> None:
        self.port, self.group_port, self._log = port, free_port(), log
        self._client: Any = None
        parent = os.getpid()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                preexec_fn=lambda: processes.exit_with_parent(parent),
            )

    def wait(self) -> None:
        """Wait until the server responds. The parent enforces the deadline by ending this rank."""
        while not healthy(self.port):
            code = self.process.poll()
            if code is not None:
                output = self._log.read_bytes()[-ENGINE_TAIL_BYTES:]
                tail = output.decode(errors="replace")
                raise ServerEnded(f"the vLLM server ended with {code} before it was up:\n{tail}")
            time.sleep(ENGINE_POLL_S)

    def arguments(self) -> Arguments:
        """Settings by which the trainer finds the server."""
        return {
            "vllm_server_base_url": None,
            "vllm_server_host": HOST,
            "vllm_server_port": self.port,
            "vllm_group_port": self.group_port,
        }

    def share_client(self, generation: Any) -> None:
        """Replace TRL's client class by a factory that returns the first trainer's client."""
        real = getattr(generation.VLLMClient, "real", generation.VLLMClient)

        def factory(*args: Any, **kwargs: Any) -> Any:
            if self._client is None:
                self._client = real(*args, **kwargs)
                connect = self._client.init_communicator

                def connect_once(*args: Any, **kwargs: Any) -> None:
                    connect(*args, **kwargs)
                    self._client.init_communicator = lambda *_, **__: None

                self._client.init_communicator = connect_once
            return self._client

        factory.real = real  # type: ignore[attr-defined]
        generation.VLLMClient = factory

    def close(self) -> None:
        """End the server and its engine processes, which would outlive it with their memory."""
        if self.process.poll() is None:
            server = self.process.pid
            for pid in [server, *processes.descendants(server)]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start_server(
    request: Request,
    folder: Path,
    scratch: Path,
    recorder: Any,
) -> Server:
    """Start the server of this load on the last of the visible GPUs."""
    port = free_port()
    scale = recorder.device.get("engine_share_scale", 1.0)
    command = server_command(request, folder, port, scale=scale)
    environment = server_environment(request["server"])
    return Server(command, scratch / "server.log", port=port, environment=environment)


def server_command(
    request: Request,
    folder: Path,
    port: int,
    *,
    scale: float = 1.0,
) -> list[str]:
    """Return the command of TRL's script. `scale`: emulated size of the card / real size."""
    # 1. Its options.
    server = request["server"]
    model = request["model"]
    gpus_of_replica = server["tensor_parallel_size"]
    replicas = server["gpus"] // gpus_of_replica
    options: Arguments = {
        "model": folder,
        "host": HOST,
        "port": port,
        "tensor_parallel_size": gpus_of_replica,
    }
    if replicas > 1:
        options["data_parallel_size"] = replicas
    options["gpu_memory_utilization"] = server["gpu_memory_utilization"] * scale
    options["max_model_len"] = server["max_model_length"]
    options["dtype"] = server.get("dtype") or model["dtype"]
    if server.get("model_impl"):
        options["vllm_model_impl"] = server["model_impl"]
    if request.get("trust_remote_code"):
        options["trust_remote_code"] = True

    # 2. The script, with the options.
    command = [sys.executable, "-m", "trl.scripts.vllm_serve"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    if model["weights"] != "real":
        from trl.scripts import vllm_serve

        if not hasattr(vllm_serve, "build_command"):
            raise ValueError(
                "this release of TRL starts its vLLM server from weights on disk alone: ask for"
                " real weights."
            )
        command += ["--load-format", "dummy"]  # the trainer pushes its own weights
    return command


def server_environment(server: Request) -> dict[str, str]:
    """Return this process's environment without a rank's variables, with the server's GPUs."""
    environment = {}
    for name, value in os.environ.items():
        if name not in RENDEZVOUS and not name.startswith(TRAINER_VARIABLES):
            environment[name] = value
    gpus = visible_gpus()
    if gpus:
        count = int(server["gpus"])
        last_gpus = gpus[-count:]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(last_gpus)
    return environment


def without_its_gpus(server: Request) -> dict[str, str]:
    """Return the variable that leaves a rank the GPUs that train.

    A single process that sees more would use them too.
    """
    gpus = visible_gpus()
    if not gpus:
        return {}
    count = int(server["gpus"])
    first_gpus = gpus[:-count]
    return {"CUDA_VISIBLE_DEVICES": ",".join(first_gpus)}


def visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        parts = visible.split(",")
        names = [name.strip() for name in parts]
        return [name for name in names if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health/", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
