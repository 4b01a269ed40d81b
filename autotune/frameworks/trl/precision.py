"""Precision of a run: the computation's, the loaded weights' and the engine's."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.job import Task
from autotune.core.space import Knobs, KnobValue

TORCH_DTYPES = ("bfloat16", "float16", "float32")

# Values of `dtype` under which transformers loads the precision of the checkpoint.
BY_CHECKPOINT = (None, "auto")


def precision_settings(chosen: Knobs, task: Task) -> dict[str, KnobValue]:
    """Return TRL's mixed precision on a GPU, and float32 on a CPU, unless chosen otherwise."""
    on_cpu = task.hardware.kind == "cpu"
    bf16 = chosen.get("bf16")
    if bf16 is None:
        bf16 = not on_cpu and not chosen.get("fp16", False)
    dtype = "float32" if on_cpu else "bfloat16"
    if "dtype" in chosen:
        dtype = loaded_dtype(chosen["dtype"], task.workload.model.config)
    return {"use_cpu": chosen.get("use_cpu", on_cpu), "bf16": bf16, "dtype": dtype}


def loaded_dtype(dtype: object, config: Mapping[str, object]) -> str:
    """Return the precision in which the trainer loads the weights."""
    if dtype in BY_CHECKPOINT:
        return checkpoint_dtype(config)
    return str(dtype).removeprefix("torch.")


def engine_dtype(config: Mapping[str, object]) -> str:
    """Return the precision of vLLM's weights, which TRL leaves to vLLM: half precision always."""
    dtype = checkpoint_dtype(config)
    return "bfloat16" if dtype == "float32" else dtype


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """Return the precision that config.json names; transformers' own default is float32."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        stated = part.get("dtype") or part.get("torch_dtype")
        dtype = str(stated).removeprefix("torch.")
        if dtype in TORCH_DTYPES:
            return dtype
    return "float32"
