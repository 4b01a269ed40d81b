"""Files that launch a run: the user's of accelerate and DeepSpeed read as settings; accelerate.yaml
and launch.sh written.

Other values of a user's file (bucket sizes, prefetching) are those of the written accelerate.yaml's
defaults; each that differs is a note. launch.sh calls accelerate and TRL's scripts itself: the
process of `trl grpo` initialises CUDA while it reads the configuration (torch from 2.8 on), and
keeps a context on the first GPU until training ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.files import read_json
from autotune.core.job import Task
from autotune.core.space import Candidate, KnobValue
from autotune.core.units import MIB
from autotune.core.yaml_document import read_document
from autotune.frameworks.trl import settings as trl_settings
from autotune.machine.nvml import DEVICE_ORDER

NOT_MODELLED = (
    "allgather_bucket_size",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)
"""ZeRO options with an effect on memory that are predicted at DeepSpeed's defaults."""

DEEPSPEED_TO_TRAINER = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""DeepSpeed's setting -> the trainer's. transformers refuses to train if they differ, unless the
first is "auto".
"""

SHARED_ROWS = {"cp": "context", "sp": "sequence", "tp": "tensor"}
"""Kinds of parallelism in which several ranks compute the same rows: part of accelerate's option
-> name.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """Settings of one launch configuration."""

    settings: Mapping[str, KnobValue]
    processes: int | None = None
    notes: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values of DeepSpeed's own that transformers compares with the trainer's, under the
    trainer's names.
    """


def read_accelerate(path: Path) -> LaunchFile:
    """Read a file of `accelerate launch --config_file`."""
    document = read_document(path)
    content = document.content
    kind = str(content.get("distributed_type", "NO")).upper()
    processes = content.get("num_processes")
    count = processes if isinstance(processes, int) else None
    if (shared := shared_rows(content.get("parallelism_config"))) is not None:
        raise document.error(("parallelism_config",), shared[0], way_out=shared[1])
    if kind == "DEEPSPEED":
        part = content.get("deepspeed_config")
        options = dict(part) if isinstance(part, Mapping) else {}
        if options.get("deepspeed_config_file"):
            named = Path(str(options["deepspeed_config_file"]))
            found = named if named.is_absolute() or named.is_file() else path.parent / named
            return replace(read_deepspeed(found), processes=count)
        settings = _zero(
            options.get("zero_stage", 2),
            options.get("offload_optimizer_device"),
            options.get("offload_param_device"),
        )
        return LaunchFile(settings=settings, processes=count)
    if kind == "FSDP":
        part = content.get("fsdp_config")
        return LaunchFile(
            settings=_fsdp(dict(part) if isinstance(part, Mapping) else {}, path), processes=count
        )
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise document.error(
            ("distributed_type",),
            f"distributed_type {kind}: not measured.",
            way_out="Use DEEPSPEED, FSDP, MULTI_GPU or NO.",
        )
    return LaunchFile(settings={}, processes=count)


def shared_rows(options: object) -> tuple[str, str] | None:
    """Return problem and fix of options that divide a row over ranks; None: there are none."""
    named = options if isinstance(options, Mapping) else {}
    for short, kind in SHARED_ROWS.items():
        for name in (f"parallelism_config_{short}_size", f"{short}_size"):
            size = named.get(name)
            if isinstance(size, int) and size > 1:
                problem = (
                    f"{name} {size}: {kind} parallelism is neither predicted nor probed; every rank"
                    " would count whole rows."
                )
                return (
                    problem,
                    (
                        "Set it to 1. Long rows also fit with zero3, activation_offloading or a"
                        " smaller micro-batch."
                    ),
                )
    return None


def read_deepspeed(given: Path | Mapping[str, object]) -> LaunchFile:
    """Read a DeepSpeed configuration: a JSON file, or its content."""
    if isinstance(given, Path):
        way_out = 'Give a file like {"zero_optimization": {"stage": 3}}.'
        given = read_json(given, dict[str, object], largest_bytes=MIB, way_out=way_out)
    part = given.get("zero_optimization")
    zero: Mapping[str, object] = part if isinstance(part, Mapping) else {}
    offloads = [zero.get(f"offload_{what}") for what in ("optimizer", "param")]
    devices = [
        offload.get("device", "none") if isinstance(offload, Mapping) else "none"
        for offload in offloads
    ]
    if zero.get("cpu_offload") is True:  # DeepSpeed's name before 0.3.16
        devices[0] = "cpu"
    fixed = {
        own: given[name]
        for name, own in DEEPSPEED_TO_TRAINER.items()
        if given.get(name) not in (None, "auto")
    }
    settings = _zero(zero.get("stage", 0), *devices)
    written = ", ".join(
        f"{name}={zero[name]}"
        for name in NOT_MODELLED
        if zero.get(name) not in (None, "auto", False)
    )
    note = (
        f"predicted with DeepSpeed's default buckets, and not with {written}: measure to include"
        " them"
    )
    return LaunchFile(settings=settings, notes=(note,) if written else (), fixed=fixed)


def read_fsdp(named: str, options: Mapping[str, object]) -> LaunchFile:
    """Read the settings `fsdp` and `fsdp_config` of transformers."""
    words = named.replace(",", " ").split()
    version = 2 if options.get("version") == 2 or options.get("fsdp_version") == 2 else 1
    if "full_shard" not in words:
        raise BadInput(
            f"fsdp {named!r}: only full_shard is measured.",
            way_out="Use fsdp: full_shard auto_wrap.",
        )
    return LaunchFile(
        settings={
            "sharding": f"fsdp{version}",
            **({"fsdp_offload_params": True} if "offload" in words else {}),
        }
    )


def _zero(stage: object, optimizer: object, parameters: object) -> dict[str, KnobValue]:
    number = int(stage) if isinstance(stage, int | str) and str(stage).isdigit() else -1
    if number not in (0, 1, 2, 3):
        raise BadInput(f"ZeRO stage {stage!r}: not a stage.", way_out="Write 0, 1, 2 or 3.")
    if not number:
        return {}
    settings: dict[str, KnobValue] = {"sharding": f"zero{number}"}
    for name, device in (
        ("offload_optimizer_device", optimizer),
        ("offload_param_device", parameters if number == 3 else None),
    ):
        if device in (None, "none"):
            continue
        if device not in trl_settings.OFFLOAD_DEVICES:
            raise BadInput(
                f"{name} {device!r}: only the host is measured.", way_out="Use cpu or none."
            )
        settings[name] = str(device)
    return settings


def _fsdp(options: Mapping[str, object], path: Path) -> dict[str, KnobValue]:
    version = 2 if str(options.get("fsdp_version", 1)) == "2" else 1
    strategy = options.get(
        "fsdp_sharding_strategy", options.get("fsdp_reshard_after_forward", "FULL_SHARD")
    )
    if version == 1 and str(strategy).upper() not in ("FULL_SHARD", "1", "TRUE"):
        raise BadInput(
            f"{path}: FSDP strategy {strategy} is not measured.",
            way_out="Use FULL_SHARD, or fsdp_version: 2.",
        )
    offload = str(options.get("fsdp_offload_params", False)).lower() == "true"
    return {"sharding": f"fsdp{version}", **({"fsdp_offload_params": True} if offload else {})}


def launch_configuration(candidate: Candidate, task: Task) -> dict[str, object]:
    """Return the file for `accelerate launch --config_file`, in the style of TRL's own ones."""
    settings, ranks = (
        candidate.settings,
        trl_settings.ranks_of(candidate.settings, task.hardware.count),
    )
    kind = trl_settings.sharding_of(settings, ranks)
    # accelerate's MULTI_GPU means one process per rank, with gloo on a CPU.
    distributed, sharding = ("MULTI_GPU" if ranks > 1 else "NO"), dict[str, object]()
    if kind in trl_settings.DEEPSPEED:
        stage = trl_settings.DEEPSPEED[kind]
        options = {
            "deepspeed_multinode_launcher": "standard",
            **{
                name: settings.get(name, "none")
                for name in ("offload_optimizer_device", "offload_param_device")
            },
            "zero3_init_flag": stage == 3,
            **({"zero3_save_16bit_model": True} if stage == 3 else {}),
            "zero_stage": stage,
        }
        distributed, sharding = "DEEPSPEED", {"deepspeed_config": options}
    elif kind in trl_settings.FSDP_VERSIONS:
        distributed, sharding = (
            "FSDP",
            {"fsdp_config": _fsdp_settings(trl_settings.FSDP_VERSIONS[kind], settings)},
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed,
        **sharding,
        "num_machines": 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16" if settings["bf16"] else "fp16" if settings["fp16"] else "no",
        "rdzv_backend": "static",
        "same_network": True,
        # use_cpu makes accelerate ignore num_processes. The YAML's own use_cpu is enough.
        "use_cpu": task.hardware.kind == "cpu" and ranks == 1,
    }


def _fsdp_settings(version: int, settings: Mapping[str, object]) -> dict[str, object]:
    first = {
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    }
    return {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": bool(settings.get("fsdp_offload_params", False)),
        "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        **(first if version == 1 else {}),
        "fsdp_version": version,
    }


SERVER_PORT = 8000  # TRL's default port; VLLM_SERVER_PORT overrides it


def launch_script(
    candidate: Candidate,
    task: Task,
    *,
    name: str,
    files: tuple[str, str],
    model: str,
    dataset: str | None,
    shim: str | None,
    program: str | None = None,
) -> str:
    """Return the script. `files` are TRL's and accelerate's; `dataset`, `shim` and `program` are
    relative to it.
    """
    config, accelerate = files
    started = f'"$here/{program}"' if program else f"-m trl.scripts.{task.workload.method}"
    train = (
        f'"$python" -m accelerate.commands.launch --config_file "$here/{accelerate}" \\\n '
        f' {started} --config "$here/{config}"'
    )
    if dataset:  # repeated relative to the script, so that the folder can be moved
        train += f' \\\n  --dataset_name "$here/{dataset}"'
    served = trl_settings.with_server(candidate.settings)
    start = _with_server(candidate, task, train, model) if served else f'exec {train} "$@"\n'
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
        **(
            {str(name): str(value) for name, value in stated.items()}
            if isinstance(stated, Mapping)
            else {}
        ),
        **(DEVICE_ORDER if task.hardware.kind == "cuda" else {}),
        **trl_settings.environment_of(candidate.settings),
    }
    lines = [f"export {variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
    if trl_settings.ALLOCATOR_VARIABLE in variables:
        lines.append(f"unset {trl_settings.NEWER_ALLOCATOR_VARIABLE}\n")
    if shim:
        lines.append(f'export PYTHONPATH="$here/{shim}${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    return "".join(lines)


def finder_of(program: str) -> str:
    """Return the lines that find a program of the training environment: an upper-case variable,
    or PATH.
    """
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
    ranks = trl_settings.ranks_of(candidate.settings, gpus)
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
    replicas = trl_settings.server_gpus(settings) // trl_settings.server_parallel(settings)
    options: dict[str, object] = {
        "tensor_parallel_size": trl_settings.server_parallel(settings),
        **({"data_parallel_size": replicas} if replicas > 1 else {}),
        "gpu_memory_utilization": settings["vllm_gpu_memory_utilization"],
        "max_model_len": settings["vllm_max_model_length"],
        "dtype": trl_settings.engine_dtype(task.workload.model.config),
    }
    if (
        task.workload.method == "async-grpo"
    ):  # vLLM's own server, to which the trainer sends weights over NCCL
        options |= {
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": '{"backend":"nccl"}',
        }
        words = " ".join(
            f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
            for name, value in options.items()
        )
        serve = f'VLLM_SERVER_DEV_MODE=1 "${{VLLM:-vllm}}" serve {shlex.quote(model)} {words}'
        return (
            serve + (" --trust-remote-code" if trusted else ""),
            '--vllm_server_base_url "http://localhost:$port"',
        )
    if settings.get("vllm_model_impl"):
        options["vllm_model_impl"] = settings["vllm_model_impl"]
    if trusted:
        options["trust_remote_code"] = True
    words = " ".join(
        f"--{name} {shlex.quote(str(value))}" for name, value in {"model": model, **options}.items()
    )
    return f'"$python" -m trl.scripts.vllm_serve {words}', '--vllm_server_port "$port"'
