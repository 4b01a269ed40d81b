"""vLLM server on GPUs that the trainer leaves free: started by the first rank, ended with it.

TRL's own script is started, as launch.sh starts it for the final run. The server and the client connection that updates its
weights stay for all candidates of a load; TRL would open a connection per trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import processes
from ..rank import free_port
from .engine import RENDEZVOUS

HOST = "127.0.0.1"
POLL_INTERVAL_S = 0.25
TAIL_BYTES = 4096
# Prefixes of variables about the trainer's ranks, which must not reach the server.
TRAINER_VARIABLES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")


class ServerEnded(RuntimeError):
    """The server exited during its start; the message contains its last output."""


class Server:
    """One server, and the client that all trainers share."""

    def __init__(self, command: Sequence[str], log: Path, *, port: int, environment: Mapping[str, str]) -> None:
        self.port, self.group_port, self._log = port, free_port(), log
        self._client: Any = None
        parent = os.getpid()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment),
                preexec_fn=lambda: processes.exit_with_parent(parent),
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the server responds. The parent enforces the deadline by ending this rank."""
        while not healthy(self.port):
            code = self.process.poll()
            if code is not None:
                tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
                raise ServerEnded(f"the vLLM server ended with {code} before it was up:\n{tail}")
            time.sleep(POLL_INTERVAL_S)

    def arguments(self) -> dict[str, Any]:
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
        ours = [self.process.pid, *processes.descendants(self.process.pid)] if self.process.poll() is None else []
        for pid in ours:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start(request: Mapping[str, Any], folder: Path, scratch: Path, recorder: Any) -> Server:
    """Start the server of this load on the last of the visible GPUs."""
    port = free_port()
    words = command(request, folder, port, scale=recorder.device.get("engine_share_scale", 1.0))
    return Server(words, scratch / "server.log", port=port, environment=environment(request["server"]))


def command(request: Mapping[str, Any], folder: Path, port: int, *, scale: float = 1.0) -> list[str]:
    """Return the command of TRL's script. `scale`: emulated size of the card / real size."""
    server, model, parallel = request["server"], request["model"], request["server"]["tensor_parallel_size"]
    replicas = server["gpus"] // parallel
    options = {
        "model": folder, "host": HOST, "port": port, "tensor_parallel_size": parallel,
        **({"data_parallel_size": replicas} if replicas > 1 else {}),
        "gpu_memory_utilization": server["gpu_memory_utilization"] * scale, "max_model_len": server["max_model_length"],
        "dtype": server.get("dtype") or model["dtype"],
    }  # fmt: skip
    if server.get("model_impl"):
        options["vllm_model_impl"] = server["model_impl"]
    if request.get("trust_remote_code"):
        options["trust_remote_code"] = True
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = [sys.executable, "-m", "trl.scripts.vllm_serve", *words]
    if model["weights"] == "real":
        return words
    from trl.scripts import vllm_serve

    if not hasattr(vllm_serve, "build_command"):
        raise ValueError("this release of TRL starts its vLLM server from weights on disk alone: ask for real weights.")
    return [*words, "--load-format", "dummy"]  # the trainer pushes its own weights


def environment(server: Mapping[str, Any]) -> dict[str, str]:
    """Return this process's environment without a rank's variables, with the server's GPUs."""
    kept = {n: v for n, v in os.environ.items() if n not in RENDEZVOUS and not n.startswith(TRAINER_VARIABLES)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[-int(server["gpus"]) :])} if visible_gpus() else kept


def without_its_gpus(server: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable that leaves a rank the GPUs that train: a single process that sees more would use them too."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[: -int(server["gpus"])])} if visible_gpus() else {}


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health/", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
