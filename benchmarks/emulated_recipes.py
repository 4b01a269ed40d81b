"""Public launch scripts really run on emulated cards: their own framework and vLLM, with tiny shapes.

One probe of `autotune run --mode emulate --from-command`, on a model of two layers and a few short rows. What the
framework's environment lacks (SGLang, kernels of flash-attn) is replaced by what it has; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.catalog.model_lookup import find_model
from benchmarks.empty_model import write_empty_model

GPUS, MODEL, LAYERS = "2xA100-40G", "Qwen2.5-0.5B", 2


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """One framework's settings for tiny shapes."""

    environment: str
    """Folder of its Python environment, with a CUDA build of torch."""

    settings: Mapping[str, str]
    """Replace the script's, where it states them."""

    added: Mapping[str, str] = field(default_factory=dict)
    """Settings that every script gets."""

    eager: Mapping[str, str] = field(default_factory=dict)
    """Keeps vLLM from compiling, which takes minutes on two cores, where a script generates."""


FRAMEWORKS: Mapping[str, Shrunk] = {
    "verl": Shrunk(
        environment="cuda-verl",
        settings={
            "data.train_batch_size": "8", "data.max_prompt_length": "64", "data.max_response_length": "32",
            "actor_rollout_ref.actor.ppo_mini_batch_size": "4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
            "actor_rollout_ref.rollout.n": "4", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "1024",
            "actor_rollout_ref.rollout.name": "vllm", "trainer.n_gpus_per_node": "2",
            "actor_rollout_ref.model.use_remove_padding": "False",
        },
        added={
            "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa", "reward.num_workers": "1",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": "2", "ray_kwargs.ray_init.num_cpus": "32",
            "actor_rollout_ref.rollout.agent.num_workers": "1", "data.dataloader_num_workers": "0",
        },
        eager={"actor_rollout_ref.rollout.enforce_eager": "True"},
    ),
    "swift": Shrunk(
        environment="cuda-swift",
        settings={
            "per_device_train_batch_size": "4", "num_generations": "4", "gradient_accumulation_steps": "1",
            "max_completion_length": "32", "max_length": "96", "vllm_max_model_len": "1024", "vllm_mode": "colocate",
            "generation_batch_size": "8", "steps_per_generation": "1",
        },
        added={"model_type": "qwen2", "template": "qwen2_5"},
        eager={"vllm_enforce_eager": "true"},
    ),
}  # fmt: skip


def shrunk(framework: str, method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's settings with tiny shapes."""
    to = FRAMEWORKS[framework]
    replaced = {name: value for name, value in to.settings.items() if name in settings}
    return {**settings, **replaced, **to.added, **(to.eager if method == "grpo" else {})}


def words(framework: str, script: Path, folder: Path, environments: Path) -> list[str]:
    """Return the arguments of `autotune` with which the script is probed once."""
    config = {**find_model(MODEL).config, "num_hidden_layers": LAYERS}
    config.pop("layer_types", None)
    write_empty_model(folder / "model", config)
    python = environments / FRAMEWORKS[framework].environment / "bin" / "python"
    return [
        "run", "--mode", "emulate", "--from-command", str(script), "--model", str(folder / "model"), "--gpus", GPUS,
        "--python", str(python), "--max-probes", "1", "--budget", "40m", "--fresh", "--json", "--out", str(folder / "out"),
    ]  # fmt: skip
