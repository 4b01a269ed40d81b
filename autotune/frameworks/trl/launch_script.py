"""launch.sh: starts the recommended run with its environment, its vLLM server and its processes.

It calls accelerate and TRL's scripts itself: the process of `trl grpo` initialises CUDA while it reads
the configuration (torch from 2.8 on), and keeps a context on the first GPU until training ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autotune.core.job import Task
from autotune.core.space import Candidate
from autotune.frameworks.trl import topology
from autotune.frameworks.trl.settings import engine_dtype
from autotune.frameworks.trl.topology import ALLOCATOR, OTHER_ALLOCATOR, ranks_of, server_gpus, server_parallel, with_server
from autotune.machine.nvml import DEVICE_ORDER

SERVER_PORT = 8000  # TRL's default port; VLLM_SERVER_PORT overrides it


def launch_script(
    candidate: Candidate, task: Task, *, name: str, files: tuple[str, str], model: str, dataset: str | None, shim: str | None,
    program: str | None = None,
) -> str:  # fmt: skip
    """Return the script. `files` are TRL's and accelerate's; `dataset`, `shim` and `program` are relative to it."""
    config, accelerate = files
    started = f'"$here/{program}"' if program else f"-m trl.scripts.{task.workload.method}"
    train = (
        f'"$python" -m accelerate.commands.launch --config_file "$here/{accelerate}" \\\n  {started} --config "$here/{config}"'
    )
    if dataset:  # repeated relative to the script, so that the folder can be moved
        train += f' \\\n  --dataset_name "$here/{dataset}"'
    start = _with_server(candidate, task, train, model) if with_server(candidate.settings) else f'exec {train} "$@"\n'
    return f"""#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL's script, which ignores unknown ones: ./{name} --max_steps 100
# Run it in the folder to which your reward functions and paths are relative.
set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{finder_of("python")}{exports(candidate, task, shim)}{start}"""


def exports(candidate: Candidate, task: Task, shim: str | None) -> str:
    """Return the lines that set the environment of a run as it was in its probe."""
    stated = task.workload.user_settings.get("env")  # set before Python starts, as `trl` does
    variables = {
        **({str(name): str(value) for name, value in stated.items()} if isinstance(stated, Mapping) else {}),
        **(DEVICE_ORDER if task.hardware.kind == "cuda" else {}),
        **topology.environment_of(candidate.settings),
    }
    lines = [f"export {variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
    if ALLOCATOR in variables:
        lines.append(f"unset {OTHER_ALLOCATOR}\n")
    if shim:
        lines.append(f'export PYTHONPATH="$here/{shim}${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    return "".join(lines)


def finder_of(program: str) -> str:
    """Return the lines that find a program of the training environment: an upper-case variable, or PATH."""
    variable = program.upper()
    return f"""{program}="${{{variable}:-{program}}}"
[ -n "$(command -v "${program}")" ] || {{
  echo "${program}: not found. Activate the training environment, or set {variable} to its path." >&2
  exit 127
}}
"""


def _with_server(candidate: Candidate, task: Task, train: str, model: str) -> str:
    """Return the start of the server on the last GPUs and of the trainer on the first ones."""
    gpus = task.hardware.count
    ranks = ranks_of(candidate.settings, gpus)
    serve, address = _server(candidate, task, model)
    return f"""gpus="${{CUDA_VISIBLE_DEVICES:-{",".join(map(str, range(gpus)))}}}"
port="${{VLLM_SERVER_PORT:-{SERVER_PORT}}}"
CUDA_VISIBLE_DEVICES="$(cut -d, -f{ranks + 1}-{gpus} <<<"$gpus")" {serve} --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
# The trainer waits for the server by itself.
CUDA_VISIBLE_DEVICES="$(cut -d, -f1-{ranks} <<<"$gpus")" {train} {address} "$@"
"""


def _server(candidate: Candidate, task: Task, model: str) -> tuple[str, str]:
    """Return the command of the server, and the trainer's option that names it."""
    settings, trusted = candidate.settings, task.workload.trust_remote_code
    replicas = server_gpus(settings) // server_parallel(settings)
    options: dict[str, object] = {
        "tensor_parallel_size": server_parallel(settings),
        **({"data_parallel_size": replicas} if replicas > 1 else {}),
        "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_len": settings["vllm_max_model_length"],
        "dtype": engine_dtype(task.workload.model.config),
    }
    if task.workload.method == "async-grpo":  # vLLM's own server, to which the trainer sends weights over NCCL
        options |= {"logprobs_mode": "processed_logprobs", "weight_transfer_config": '{"backend":"nccl"}'}
        words = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in options.items())
        serve = f'VLLM_SERVER_DEV_MODE=1 "${{VLLM:-vllm}}" serve {shlex.quote(model)} {words}'
        return serve + (" --trust-remote-code" if trusted else ""), '--vllm_server_base_url "http://localhost:$port"'
    if settings.get("vllm_model_impl"):
        options["vllm_model_impl"] = settings["vllm_model_impl"]
    if trusted:
        options["trust_remote_code"] = True
    words = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in {"model": model, **options}.items())
    return f'"$python" -m trl.scripts.vllm_serve {words}', '--vllm_server_port "$port"'
