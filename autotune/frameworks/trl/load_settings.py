"""Settings of TRL whose change requires a new load."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.job import Task
from autotune.core.space import KnobValue
from autotune.frameworks.base import Settings, count_of
from autotune.frameworks.trl.adapter_settings import LORA_SETTINGS
from autotune.frameworks.trl.settings import LAUNCH, LAUNCH_DEFAULTS, VLLM_SETTINGS, ranks_of


def load_of(settings: Settings, task: Task) -> dict[str, KnobValue]:
    """Return the settings whose change requires a new load.

    The engine's size depends on the generation batch: at a constant one, micro-batch and
    accumulation change on the same engine.
    """
    names = [
        "dtype",
        "attn_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "use_peft",
        *LORA_SETTINGS,
        "use_rslora",
        "use_dora",
    ]
    if not settings["use_vllm"]:
        return load_with(names, settings, task)
    names += [*VLLM_SETTINGS, "vllm_max_model_length", "vllm_model_impl"]
    return load_with(names, settings, task) | {"max_num_seqs": max_num_seqs(settings)}


def load_with(
    names: Iterable[str],
    settings: Settings,
    task: Task,
) -> dict[str, KnobValue]:
    """Return the model, its device and ranks, the launch, and the named settings."""
    model = task.workload.model
    load: dict[str, KnobValue] = {
        "model": model.name,
        "model_config": model.fingerprint,
        "weights": task.workload.weights,
        "device": task.hardware.kind,
        "ranks": ranks_of(settings, task.hardware.count),
    }
    for name in LAUNCH:
        value = settings.get(name)
        if value not in (None, "none", LAUNCH_DEFAULTS.get(name)):
            load[name] = value
    for name in names:
        if name in settings:
            load[name] = settings[name]
    return load


def max_num_seqs(settings: Settings) -> int:
    """Return the number of sequences of TRL's engine: micro-batch x tensor parallel x steps."""
    micro = count_of(settings, "per_device_train_batch_size")
    parallel = count_of({"vllm_tensor_parallel_size": 1, **settings}, "vllm_tensor_parallel_size")
    return micro * parallel * count_of(settings, "steps_per_generation")
