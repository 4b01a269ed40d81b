"""Public launch scripts really run on emulated cards: their own framework and vLLM, with tiny
shapes.

One probe of `autotune run --mode emulate --from-command`, on a model of two layers and a few short
rows. What the framework's environment lacks (SGLang, kernels of flash-attn) is replaced by what it
has; nothing else is changed.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import emulated_frameworks
from empty_model import write_empty_model

from autotune.catalog.model_lookup import find_model
from autotune.emulator.cards import emulated_machine
from autotune.emulator.launch import rehearse
from autotune.frameworks.launched_run import Launched
from autotune.machine import environment
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.worker.launched_output import line_source

GPUS, MODEL, LAYERS = "2xA100-40G", "Qwen2.5-0.5B", 2
GPUS_WITH_SERVER = "3xA100-40G"
"""The last one is the vLLM server's."""

SERVER_SCRIPT = "rollout.sh"
"""File of a launch that starts its vLLM server."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """One framework's settings for tiny shapes."""

    environment: str
    """Folder of its Python environment, with a CUDA build of torch."""

    settings: Mapping[str, str]
    """Replace the script's, where it states them."""

    added: Mapping[str, str] = field(default_factory=dict)
    """Settings of the command alone, which autotune neither models nor passes to a probe."""

    always: Mapping[str, str] = field(default_factory=dict)
    """Settings that every script gets."""

    eager: Mapping[str, str] = field(default_factory=dict)
    """Keeps vLLM from compiling, which takes minutes on two cores, where a script generates."""


FRAMEWORKS: Mapping[str, Shrunk] = {
    "verl": Shrunk(
        environment="cuda-verl",
        settings={
            "data.train_batch_size": "8",
            "data.max_prompt_length": "64",
            "data.max_response_length": "32",
            "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.rollout.n": "4",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "1024",
            "actor_rollout_ref.rollout.name": "vllm",
            "trainer.n_gpus_per_node": "2",
            "actor_rollout_ref.model.use_remove_padding": "False",
        },
        added={
            "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
            "reward.num_workers": "1",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": "2",
            "ray_kwargs.ray_init.num_cpus": "32",
            "actor_rollout_ref.rollout.agent.num_workers": "1",
            "data.dataloader_num_workers": "0",
        },
        eager={"actor_rollout_ref.rollout.enforce_eager": "True"},
    ),
    "swift": Shrunk(
        environment="cuda-swift",
        settings={
            "per_device_train_batch_size": "4",
            "num_generations": "4",
            "gradient_accumulation_steps": "1",
            "max_completion_length": "32",
            "max_length": "96",
            "vllm_max_model_len": "1024",
            "generation_batch_size": "8",
            "steps_per_generation": "1",
        },
        always={"model_type": "qwen2", "template": "qwen2_5"},
        eager={"vllm_enforce_eager": "true"},
    ),
}


def shrunk(
    framework: str,
    method: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the script's settings with tiny shapes."""
    to = FRAMEWORKS[framework]
    replaced = {name: value for name, value in to.settings.items() if name in settings}
    return {**settings, **replaced, **to.always, **(to.eager if method == "grpo" else {})}


def gpus(settings: Mapping[str, Any]) -> str:
    """Return the cards of the run."""
    return GPUS_WITH_SERVER if settings.get("vllm_mode") == "server" else GPUS


def is_rehearsed(framework: str, settings: Mapping[str, Any]) -> bool:
    """Return True if the command is run as it is: a probe has no more settings and starts no
    server.
    """
    return bool(FRAMEWORKS[framework].added) or settings.get("vllm_mode") == "server"


def run_arguments(
    framework: str,
    script: Path,
    folder: Path,
    environments: Path,
) -> list[str]:
    """Return the arguments of `autotune` with which the script is probed once."""
    python = _prepared(framework, folder, environments)
    return [
        "run",
        "--mode",
        "emulate",
        "--from-command",
        str(script),
        "--model",
        str(folder / "model"),
        "--gpus",
        GPUS,
        "--python",
        str(python),
        "--max-probes",
        "1",
        "--budget",
        "40m",
        "--fresh",
        "--json",
        "--out",
        str(folder / "out"),
    ]


def rehearsed(
    framework: str,
    script: Path,
    folder: Path,
    environments: Path,
    cards: str,
) -> dict[str, Any]:
    """Run the command of a probe with `added`, of which a probe has nothing: two cores need it."""
    began, python = time.monotonic(), _prepared(framework, folder, environments)
    model = str(folder / "model")
    request = parse_request(
        Flags(
            from_command=str(script),
            model=model,
            gpus=cards,
            python=str(python),
            mode="predict",
        )
    )
    launch = cast(Launched, request.trainer).launch(
        candidate_of_job(request), request.job.task, emulated_frameworks.plan()
    )
    lines = line_source(asdict(launch.figures), folder)
    added = tuple(f"{name}={value}" for name, value in FRAMEWORKS[framework].added.items())
    setup = emulated_frameworks.Setup(
        name=framework,
        framework=framework,
        holds=(),
        added=added,
    )
    command = emulated_frameworks.command(launch, setup, folder)
    if SERVER_SCRIPT in launch.files:
        command = _beside_server(command, folder / SERVER_SCRIPT, FRAMEWORKS[framework].eager)
    rehearsal = rehearse(command, emulated_machine(cards), python, sys.stderr.write)
    return {
        "exit_code": rehearsal.code,
        "error": rehearsal.failure and rehearsal.failure.message,
        "seconds": round(time.monotonic() - began),
        "outcome": "ok" if rehearsal.code == 0 else "crash",
        "steps": emulated_frameworks.records(asdict(launch.figures), lines(list(rehearsal.output))),
        "peak_memory_bytes": max(rehearsal.report.card_peak_bytes.values(), default=None),
    }


def versions(framework: str, environments: Path) -> dict[str, str]:
    """Return the releases that a run has."""
    installed = environment.versions(_python(framework, environments), emulated_frameworks.PACKAGES)
    return {name: version for name, version in installed.items() if version}


def _python(framework: str, environments: Path) -> Path:
    return environments / FRAMEWORKS[framework].environment / "bin" / "python"


def _beside_server(
    command: list[str],
    server: Path,
    options: Mapping[str, str],
) -> list[str]:
    """Return a command that starts the server, waits for its port, trains and ends the server."""
    port = re.findall(r"--port (\d+)", server.read_text())[0]
    flags = " ".join(f"--{name} {value}" for name, value in options.items())
    script = f"""
        set -m
        bash {server} {flags} & server=$!
        trap 'kill -- -$server; wait $server' EXIT
        until (exec 3<> /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do
          kill -0 $server || exit 1
          sleep 2
        done
        {shlex.join(command)}
    """
    return ["bash", "-c", script]


def _prepared(
    framework: str,
    folder: Path,
    environments: Path,
) -> Path:
    """Write the model, and return the framework's Python."""
    config = {**find_model(MODEL).config, "num_hidden_layers": LAYERS}
    config.pop("layer_types", None)
    write_empty_model(folder / "model", config)
    return _python(framework, environments)
