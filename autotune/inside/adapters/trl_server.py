"""vLLM in a server of its own, on GPUs that the trainer leaves to it: started by the first rank, ended with it.

TRL's own script is started, as launch.sh starts it for the final run. The server stays for all candidates of a load, and so
does the one line to it over which weights are renewed: TRL would open another with every trainer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import processes
from .trl_engine import RENDEZVOUS

HOST = "127.0.0.1"
LOOK_SECONDS = 0.25
TAIL_BYTES = 4096
OF_THE_TRAINER = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")
"""Variables that say how the trainer's ranks are spread: none of the server's business."""


class ServerEnded(RuntimeError):
    """The server ended instead of coming up; its last words are part of the message."""


class Server:
    """One server, and the client that all trainers share."""

    def __init__(self, command: Sequence[str], log: Path, *, port: int, environment: Mapping[str, str]) -> None:
        self.port, self.group_port, self._log = port, free_port(), log
        self._client: Any = None
        keeper = os.getpid()
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=dict(environment),
                preexec_fn=lambda: processes.die_with_parent(keeper),
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers. A deadline is kept by whoever ends this whole rank."""
        while not healthy(self.port):
            code = self.process.poll()
            if code is not None:
                raise ServerEnded(f"the vLLM server ended with {code} before it was up:\n{self.last_words()}")
            time.sleep(LOOK_SECONDS)

    def last_words(self) -> str:
        return self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def arguments(self) -> dict[str, Any]:
        """Where the trainer finds it."""
        return {
            "vllm_server_base_url": None,
            "vllm_server_host": HOST,
            "vllm_server_port": self.port,
            "vllm_group_port": self.group_port,
        }

    def share_client(self, generation: Any) -> None:
        """Put a stand-in where TRL looks for its client: the first trainer's serves all that follow."""
        real = getattr(generation.VLLMClient, "real", generation.VLLMClient)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._client is None:
                self._client = real(*args, **kwargs)
                self._client.init_communicator = once(self._client.init_communicator)
            return self._client

        stand_in.real = real  # type: ignore[attr-defined]
        generation.VLLMClient = stand_in

    def close(self) -> None:
        """The engine's own processes are ended with it: they would outlive a server that is killed, and keep their memory."""
        ours = [self.process.pid, *processes.descendants(self.process.pid)] if self.process.poll() is None else []
        for pid in ours:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def once(method: Any) -> Any:
    """The method, whose second call does nothing."""
    done: list[bool] = []

    def called(*args: Any, **kwargs: Any) -> None:
        if not done:
            method(*args, **kwargs)
            done.append(True)

    return called


def start(request: Mapping[str, Any], folder: Path, scratch: Path, stage: Any) -> Server:
    """The server of this load, on the last of the GPUs that are visible here."""
    port, scale = free_port(), stage.device.get("engine_share_scale", 1.0)
    words = command(request, folder, port, scale=scale)
    return Server(words, scratch / "server.log", port=port, environment=environment(request["server"]))


def command(request: Mapping[str, Any], folder: Path, port: int, *, scale: float = 1.0) -> list[str]:
    """TRL's script by module, so that it runs under this very interpreter. `scale` is what a smaller card is of the real one."""
    server = request["server"]
    asked = {
        "model": folder, "host": HOST, "port": port, "tensor_parallel_size": server["gpus"],
        "gpu_memory_utilization": server["gpu_memory_utilization"] * scale, "max_model_len": server["max_model_length"],
        "dtype": request["model"]["dtype"],
    }  # fmt: skip
    if server.get("model_impl"):
        asked["vllm_model_impl"] = server["model_impl"]
    if request.get("trust_remote_code"):
        asked["trust_remote_code"] = True
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "trl.scripts.vllm_serve", *words, *_without_weights(request)]


def _without_weights(request: Mapping[str, Any]) -> list[str]:
    """The trainer pushes its own before the first generation, so nothing need be on disk. Older scripts cannot be told so."""
    if request["model"]["weights"] == "real":
        return []
    from trl.scripts import vllm_serve

    if not hasattr(vllm_serve, "build_command"):
        raise ValueError("this release of TRL starts its vLLM server from weights on disk alone: ask for real weights.")
    return ["--load-format", "dummy"]


def environment(server: Mapping[str, Any]) -> dict[str, str]:
    """This process's own, without what makes it a rank."""
    kept = {n: v for n, v in os.environ.items() if n not in RENDEZVOUS and not n.startswith(OF_THE_TRAINER)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[-int(server["gpus"]) :])} if visible_gpus() else kept


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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
