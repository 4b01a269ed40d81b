"""Runs the adapter in this process, without a worker: one load, then one request after another.

    python tests/worker/drive.py REQUESTS.json
        {"load": {...}, "measures": [{...}, ...]}  ->  JSON on stdout's last line

Also a library for the tests: `inside()` loads autotune/worker by path like the worker's start;
`load_request` and `measure_request` build requests for the tiny model.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

INSIDE = Path(__file__).parents[2] / "autotune" / "worker"
PACKAGE = "autotune_worker"


def inside(name: str = "") -> ModuleType:
    """Import a module of autotune/worker under its name in a training environment without
    autotune.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, INSIDE / "__init__.py", submodule_search_locations=[str(INSIDE)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def adapter() -> ModuleType:
    return inside("trl.grpo_probe")


def load_request(
    scratch: Path | str, *, config: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    model = {
        "folder": None,
        "config": config or inside("synthetic").tiny_config(),
        "weights": "random",
        "dtype": "float32",
    }
    request = {
        "model": model,
        "adapter": None,
        "engine": None,
        "device": "cpu",
        "seed": 42,
        "scratch": str(scratch),
    }
    return {**request, **changes}


def measure_request(
    settings: dict[str, Any] | None = None,
    *,
    prompt: int = 16,
    completion: int = 8,
    typical: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    small = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": completion,
    }
    plan = {
        "optimizer_steps": 2,
        "warmup_cycles": 1,
        "timed_cycles": 2,
        "stop_below_tokens_per_second": None,
    }
    plan |= changes.pop("plan", {})
    drawn = {name: changes.pop(name) for name in ("drawn", "drawn_prompts") if name in changes}
    request = {
        "settings": {**small, **(settings or {})},
        "lengths": {
            "prompt": prompt,
            "completion": completion,
            "typical": typical,
            **drawn,
        },
        "dataset": None,
        "reward_funcs": None,
        "plan": plan,
        "seed": 42,
    }
    return {**request, **changes}


def engine_request(**changes: Any) -> dict[str, Any]:
    small = {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 64, "max_num_seqs": 4}
    return {
        **small,
        "vllm_tensor_parallel_size": 1,
        "vllm_enable_sleep_mode": False,
        **changes,
    }


def events_stage(**options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a recorder, and the list of its events."""
    events: list[dict[str, Any]] = []
    return inside("phase_recorder").PhaseRecorder(emit=events.append, **options), events


def _allow(growth_bytes: int | None) -> None:
    """Limit the growth of this process: allocations beyond fail, as on a full machine."""
    data = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if "VmData" in line
    )
    limit = resource.RLIM_INFINITY if growth_bytes is None else data + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def run(
    document: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """Load and measure like a rank, and time each request; failures are results, too."""
    trl = adapter()
    clock = time.perf_counter
    limits = {"limit_bytes": document.get("limit_bytes")}
    began = clock()
    with inside("library_imports").kept_imports():
        versions = trl.warm(document["load"])
    answer: dict[str, Any] = {
        "versions": versions,
        "warm_seconds": clock() - began,
        "measures": [],
    }
    if document["load"].get("method") == "async-grpo":  # its kernel for packed rows is one for GPUs
        importlib.import_module("tests.counted_memory.varlen").install()
    began = clock()
    stage, _ = events_stage(rank=rank, world_size=world_size, **limits)
    loaded = trl.load(document["load"], stage)
    answer |= {"load_seconds": clock() - began, "load_memory": stage.memory()}
    for request in document["measures"]:
        began = clock()
        stage, events = events_stage(rank=rank, world_size=world_size, **limits)
        _allow(document.get("growth_bytes"))
        try:
            outcome = {"result": trl.measure(loaded, request, stage)}
        except Exception as error:
            outcome = {
                "error": type(error).__name__,
                "text": str(error),
                "phase": stage.phase,
                "partial": getattr(error, "partial", None),
            }
            if document.get("traceback"):
                traceback.print_exc()
            error.__traceback__ = None
            del error
        _allow(None)
        gc.collect()
        trl.release(loaded)
        held_bytes = stage._meter.now()
        answer["measures"].append(
            {
                **outcome,
                "seconds": clock() - began,
                "held_after": held_bytes,
                "events": len(events),
            }
        )
    return answer


def run_apart(
    document: dict[str, Any],
    folder: Path,
    *,
    ranks: int = 1,
    timeout: float = 240,
    release: Path | None = None,
) -> list[dict[str, Any]]:
    """Run the same in separate processes, one per rank, for tests of memory and ranks.

    `release`: the folder of another release of TRL. Without an engine, vLLM is not there.
    """
    from tests.light_environment import light_python_path

    path = folder / "requests.json"
    path.write_text(json.dumps(document))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    folders = [] if release is None else [release]
    if document["load"]["engine"] is None:
        base["PYTHONPATH"] = light_python_path(*folders)
    elif release is not None:
        base["PYTHONPATH"] = str(release)
    started = []
    for rank in range(ranks):
        rank_variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, __file__, str(path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(
            subprocess.Popen(
                command, env={**base, **(rank_variables if ranks > 1 else {})}, cwd=folder, **pipes
            )
        )
    answers = []
    try:
        for process in started:
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, err[-4000:]
            answers.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return answers


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    answer = run(
        document,
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
