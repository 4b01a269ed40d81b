"""launch.sh: the recommended run, started as it was measured: its environment, its server, its processes."""

from __future__ import annotations

import shlex

from autotune.candidate import Candidate
from autotune.trainers.base import Job
from autotune.trainers.trl_topology import environment_of, ranks_of, server_gpus, with_server

SERVER_PORT = 8000
"""TRL's own default, on both sides; another is said with VLLM_SERVER_PORT."""


def script(
    candidate: Candidate, job: Job, *, name: str, files: tuple[str, str], model: str, dataset: str | None, shim: str | None,
    program: str | None = None,
) -> str:  # fmt: skip
    """The whole of it. `files` are TRL's and accelerate's own; `dataset`, `shim` and `program` lie beside them."""
    exports = [f"export {variable}={shlex.quote(value)}\n" for variable, value in environment_of(candidate.settings).items()]
    if shim:
        exports.append(f'export PYTHONPATH="$here/{shim}${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    # What lies beside this file is named again, so that it is found wherever the folder is moved.
    beside = f' \\\n  --dataset_name "$here/{dataset}"' if dataset else ""
    served = with_server(candidate.settings)
    train = _started(job, files, program) + beside
    start = _with_server(candidate, job, train, model) if served else f'exec {train} "$@"\n'
    return f"""#!/usr/bin/env bash
# Starts the recommended run. Further arguments go to TRL: ./{name} --max_steps 100
# Run it from the folder that your reward functions and relative paths are found from.
set -euo pipefail
here="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{_interpreter(job) if program else _command(job)}{"".join(exports)}{start}"""


def _command(job: Job) -> str:
    """TRL's own, of the environment that was measured where it is there; TRL=... names another."""
    trl = shlex.quote(str(job.workload.python.parent / "trl"))
    return f"""trl={trl}
[ -x "$trl" ] || trl=trl
trl="${{TRL:-$trl}}"
"""


def _interpreter(job: Job) -> str:
    """The same of a program; PYTHON=... names another."""
    python = shlex.quote(str(job.workload.python))
    return f"""python={python}
[ -x "$python" ] || python=python3
python="${{PYTHON:-$python}}"
"""


def _started(job: Job, files: tuple[str, str], program: str | None) -> str:
    """TRL's command, which hands accelerate its part; or accelerate with a program of its own."""
    if program is None:
        return f'"$trl" {job.workload.method} --config "$here/{files[0]}" --config_file "$here/{files[1]}"'
    launch = f'"$python" -m accelerate.commands.launch --config_file "$here/{files[1]}"'
    return f'{launch} "$here/{program}" --config "$here/{files[0]}"'


def _with_server(candidate: Candidate, job: Job, train: str, model: str) -> str:
    """The server takes the last GPUs, the trainer the first, as they were measured. The server ends with the trainer."""
    settings, gpus = candidate.settings, job.hardware.count
    trains, serves = ranks_of(settings, gpus), server_gpus(settings)
    asked = {
        "model": model, "tensor_parallel_size": serves, "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_len": settings["vllm_max_model_length"], "dtype": settings["dtype"],
    }  # fmt: skip
    if settings.get("vllm_model_impl"):
        asked["vllm_model_impl"] = settings["vllm_model_impl"]
    if job.workload.trust_remote_code:
        asked["trust_remote_code"] = True
    words = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in asked.items())
    return f"""gpus="${{CUDA_VISIBLE_DEVICES:-{",".join(map(str, range(gpus)))}}}"
port="${{VLLM_SERVER_PORT:-{SERVER_PORT}}}"
CUDA_VISIBLE_DEVICES="$(cut -d, -f{trains + 1}-{gpus} <<<"$gpus")" "$trl" vllm-serve {words} --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
# The trainer waits for the server by itself.
CUDA_VISIBLE_DEVICES="$(cut -d, -f1-{trains} <<<"$gpus")" {train} --vllm_server_port "$port" "$@"
"""
