"""Memory of a rollout engine, vLLM or SGLang, on a device beside other memory."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalog import Gpu
from autotune.core.composition import Composition, EngineSettings
from autotune.estimate import model_shape, sglang_engine, vllm_engine
from autotune.estimate.engine_use import EnginePlace, EngineUse
from autotune.estimate.model_shape import dtype_bytes
from autotune.estimate.vllm_engine import TRL_BATCHED_TOKENS as TRL_BATCHED_TOKENS


def fit(
    config: Mapping[str, object],
    settings: EngineSettings,
    *,
    dtype: str,
    gpu: Gpu | None,
    device_memory_bytes: int,
    other_bytes: int,
    limit_bytes: int | None = None,
    vllm: str | None = None,
    on_cpu: bool = False,
    adapter_rank: int = 0,
) -> EngineUse:
    """Return the engine's memory; of vLLM with an adapter's rank, with the slot into which it is
    loaded.

    `other_bytes`: memory of the device in use when the engine starts. `limit_bytes`: memory limit,
    of which the engine has its share; None: the whole device. `vllm`: its version; None: a current
    one.
    """
    place = EnginePlace(
        gpu=gpu,
        device_memory_bytes=device_memory_bytes,
        limit_bytes=limit_bytes,
        other_bytes=other_bytes,
        on_cpu=on_cpu,
    )
    if settings.kind != "vllm":
        return sglang_engine.fit(config, settings, place, dtype=dtype)
    return vllm_engine.fit(
        config,
        settings,
        place,
        dtype=dtype,
        vllm=vllm,
        adapter_rank=adapter_rank,
    )


def inputs_beside(composition: Composition, config: Mapping[str, object]) -> int | None:
    """Return the input buffer of a vLLM engine in the trainer's process, whose free blocks it
    finds; None for another one.
    """
    settings = composition.engine
    if settings is None or settings.kind != "vllm" or settings.apart:
        return None
    size = dtype_bytes(composition["engine"].dtype)
    return vllm_engine.inputs_bytes(settings, model_shape.shape(config), size)
