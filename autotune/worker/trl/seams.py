"""Names of TRL that probes and traces replace, wrap or read, although TRL does not guarantee them.

`check` runs after the imports and reports a missing name before anything is measured with a hook
that is never called. A test compares the whole table with each supported release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OLDEST = "1.0.0"
NEWEST = "1.16.0"
ASYNC_OLDEST = "1.16.0"  # first release whose rows are trees of rollouts
KTO_OLDEST = "1.8.0"  # before, KTO was an experimental trainer with another preparation of its rows
GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
SFT = "trl.trainer.sft_trainer"
DPO = "trl.trainer.dpo_trainer"
KTO = "trl.trainer.kto_trainer"
REWARD_MODULE = "trl.trainer.reward_trainer"
ASYNC_PACKAGE = "trl.experimental.async_grpo"
ASYNC_GRPO = f"{ASYNC_PACKAGE}.async_grpo_trainer"
ASYNC_PACKING = f"{ASYNC_PACKAGE}.packing"
ONLINE_DPO = "trl.experimental.online_dpo.online_dpo_trainer"
GENERATION = "trl.generation.vllm_generation"
UTILS = "trl.trainer.utils"

REFERENCE_LOADER = "create_model_from_path"
# Modules whose trainer loads a reference model with REFERENCE_LOADER.
REFERENCE_MODULES = (GRPO, RLOO, DPO, KTO)


class Seam(NamedTuple):
    """Hooked name of TRL."""

    module: str
    name: str  # `function`, or `Class.method`
    why: str
    # `probe`: required by each probe of the method. `trace`: only by traces. `either`: looked up
    # where it exists
    use: str
    since: str


_SINCE = {KTO: KTO_OLDEST, ASYNC_GRPO: ASYNC_OLDEST, ASYNC_PACKING: ASYNC_OLDEST}


def _seam(
    module: str,
    name: str,
    why: str,
    use: str = "probe",
    since: str | None = None,
) -> Seam:
    return Seam(module, name, why, use, since or _SINCE.get(module, OLDEST))


def _methods(
    module: str,
    cls: str,
    reasons: Mapping[str, str],
    use: str = "probe",
) -> list[Seam]:
    """Return seams of a class's methods, whose names lead to the reasons for hooking them."""
    return [_seam(module, f"{cls}.{name}", why, use) for name, why in reasons.items()]


def _in_modules(
    modules: Sequence[str],
    name: str,
    why: str,
    use: str,
) -> list[Seam]:
    return [_seam(module, name, why, use) for module in modules]


_ONLINE = {
    "_generate": "phase rollout",
    "_generate_single_turn": (
        "one generation, which a later candidate can reuse; synthetic completions in a trace"
    ),
    "_tokenize_prompts": "prompts of the forced length",
    "_generate_and_score_completions": "tokens of a generation batch",
    "_calculate_rewards": "phase reward",
    "_get_per_token_logps_and_entropies": "phase score; repeated chunks in a trace",
    "compute_loss": "phase forward",
}
_ONLINE_TRACED = {
    "_prepare_inputs": "inputs of a micro-step",
    "_get_train_sampler": "rows in their order",
}
_OFFLINE = {
    "_prepare_dataset": "rows of the forced length",
    "compute_loss": "phases forward and score, tokens of a batch",
}
_ASYNC = {
    "compute_loss": "phase forward, tokens of a micro-batch",
    "_sync_weight": "phase sync; left out of a trace",
}
_ONLINE_DPO = {
    "_generate": "phase rollout; synthetic completions in a trace",
    "_forward": "phase score, tokens of a batch",
    "_calculate_rewards_from_functions": "phase reward",
    "training_step": "phase forward",
}
_PRECOMPUTED = {"_precompute_ref_logps": "pass over all rows, left out of a trace"}

SEAMS: tuple[Seam, ...] = (
    *_methods(GRPO, "GRPOTrainer", _ONLINE),
    *_methods(RLOO, "RLOOTrainer", _ONLINE),
    *_methods(SFT, "SFTTrainer", _OFFLINE),
    *_methods(DPO, "DPOTrainer", _OFFLINE),
    *_methods(KTO, "KTOTrainer", _OFFLINE),
    *_methods(REWARD_MODULE, "RewardTrainer", _OFFLINE),
    *_methods(ASYNC_GRPO, "AsyncGRPOTrainer", _ASYNC),
    *_methods(ONLINE_DPO, "OnlineDPOTrainer", _ONLINE_DPO),
    *_methods(GRPO, "GRPOTrainer", _ONLINE_TRACED, "trace"),
    *_methods(RLOO, "RLOOTrainer", _ONLINE_TRACED, "trace"),
    *_methods(DPO, "DPOTrainer", _PRECOMPUTED, "trace"),
    *_methods(KTO, "KTOTrainer", _PRECOMPUTED, "trace"),
    *_in_modules(
        (DPO, KTO), "hash_module", "hash of weights that do not exist in a trace", "trace"
    ),
    _seam(ASYNC_GRPO, REFERENCE_LOADER, "model in memory", "either"),
    _seam(ASYNC_GRPO, "get_peak_flops_per_device", "no name of a GPU in a trace", "either"),
    _seam(ASYNC_PACKING, "_flash_attn", "no kernel from the hub in a trace", "trace"),
    _seam(GENERATION, "VLLMGeneration.sync_weights", "phase sync"),
    _seam(GENERATION, "VLLMClient", "one connection to a server for all trainers", "either"),
    _seam(
        "trl.import_utils",
        "is_vllm_available",
        "no import of vLLM, which takes ten seconds, for loads without it",
        "either",
    ),
    *_in_modules(
        REFERENCE_MODULES, REFERENCE_LOADER, "reference model as a copy in memory", "either"
    ),
    _seam(UTILS, REFERENCE_LOADER, "sharded model loaded by TRL's own function", "either"),
    *_in_modules((GRPO, RLOO), "VLLMGeneration", "no engine in a trace", "trace"),
    *_in_modules(
        (SFT, DPO, REWARD_MODULE, KTO),
        "get_act_offloading_ctx_manager",
        "no streams in a trace",
        "either",
    ),
    _seam(
        UTILS,
        "_CHUNKED_LOGPROB_CHUNK_SIZE",
        "vocabulary projected at once; absent if all of it is",
        "either",
        "1.16.0",
    ),
    _seam(
        "trl.models.utils",
        "add_hooks",
        "ZeRO-3's hooks after a rollout: read, not called",
        "either",
    ),
    _seam(
        "trl.scripts.vllm_serve",
        "build_command",
        "vLLM server without weights on disk",
        "either",
        "1.16.0",
    ),
)


class UnsupportedFramework(ImportError):
    """The installed release lacks a name that a probe hooks."""


def supported() -> tuple[str, str]:
    """Return the oldest and the newest tested release."""
    return OLDEST, NEWEST


def check(
    trainer_class: Any,
    generation: Any,
    version: str,
) -> None:
    """Raise UnsupportedFramework if names that a probe of this trainer needs are missing."""
    owners = {
        trainer_class.__name__: trainer_class,
        "VLLMGeneration": getattr(generation, "VLLMGeneration", None),
    }
    missing = []
    for seam in SEAMS:
        cls, _, name = seam.name.rpartition(".")
        is_replaced = seam.use == "probe" and cls in owners
        if is_replaced and not hasattr(owners[cls], name):
            missing.append(seam.name)
    if missing:
        raise UnsupportedFramework(
            f"TRL {version} has no {', '.join(missing)}, which a probe measures by; releases"
            f" {OLDEST} to {NEWEST} have."
        )
