"""Names of TRL that probes and traces replace, wrap or read, although TRL does not guarantee them.

`check` runs after the imports and reports a missing name before anything is measured with a hook
that is never called. A test compares the whole table with each supported release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

OLDEST, NEWEST = "1.0.0", "1.16.0"
ASYNC_OLDEST = "1.16.0"  # first release whose rows are trees of rollouts
KTO_OLDEST = "1.8.0"  # before, KTO was an experimental trainer with another preparation of its rows
GRPO = "trl.trainer.grpo_trainer"
RLOO = "trl.trainer.rloo_trainer"
SFT = "trl.trainer.sft_trainer"
DPO = "trl.trainer.dpo_trainer"
KTO = "trl.trainer.kto_trainer"
REWARD = "trl.trainer.reward_trainer"
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
    """One hooked name."""

    module: str
    name: str  # `function`, or `Class.method`
    why: str
    # `probe`: required by each probe of the method. `trace`: only by traces. `either`: looked up
    # where it exists
    use: str
    since: str
    until: str


_SINCE = {KTO: KTO_OLDEST, ASYNC_GRPO: ASYNC_OLDEST, ASYNC_PACKING: ASYNC_OLDEST}


def _seam(module: str, name: str, why: str, use: str = "probe", since: str | None = None) -> Seam:
    return Seam(
        module,
        name,
        why,
        use,
        since or _SINCE.get(module, OLDEST),
        NEWEST,
    )


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
_OFFLINE = {
    "_prepare_dataset": "rows of the forced length",
    "compute_loss": "phases forward and score, tokens of a batch",
}
_ONLINE_TRACED = {
    "_prepare_inputs": "inputs of a micro-step",
    "_get_train_sampler": "rows in their order",
}
_BY_CLASS: Mapping[tuple[str, str], Mapping[str, str]] = {
    (GRPO, "GRPOTrainer"): _ONLINE,
    (RLOO, "RLOOTrainer"): _ONLINE,
    (SFT, "SFTTrainer"): _OFFLINE,
    (DPO, "DPOTrainer"): _OFFLINE,
    (KTO, "KTOTrainer"): _OFFLINE,
    (REWARD, "RewardTrainer"): _OFFLINE,
    (ASYNC_GRPO, "AsyncGRPOTrainer"): {
        "compute_loss": "phase forward, tokens of a micro-batch",
        "_sync_weight": "phase sync; left out of a trace",
    },
    (ONLINE_DPO, "OnlineDPOTrainer"): {
        "_generate": "phase rollout; synthetic completions in a trace",
        "_forward": "phase score, tokens of a batch",
        "_calculate_rewards_from_functions": "phase reward",
        "training_step": "phase forward",
    },
}

SEAMS: tuple[Seam, ...] = (
    *(
        _seam(module, f"{cls}.{name}", why)
        for (module, cls), names in _BY_CLASS.items()
        for name, why in names.items()
    ),
    *(_seam(GRPO, f"GRPOTrainer.{name}", why, "trace") for name, why in _ONLINE_TRACED.items()),
    *(_seam(RLOO, f"RLOOTrainer.{name}", why, "trace") for name, why in _ONLINE_TRACED.items()),
    _seam(
        DPO, "DPOTrainer._precompute_ref_logps", "pass over all rows, left out of a trace", "trace"
    ),
    _seam(
        KTO, "KTOTrainer._precompute_ref_logps", "pass over all rows, left out of a trace", "trace"
    ),
    *(
        _seam(module, "hash_module", "hash of weights that do not exist in a trace", "trace")
        for module in (DPO, KTO)
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
    *(
        _seam(module, REFERENCE_LOADER, "reference model as a copy in memory", "either")
        for module in REFERENCE_MODULES
    ),
    _seam(UTILS, REFERENCE_LOADER, "sharded model loaded by TRL's own function", "either"),
    *(_seam(module, "VLLMGeneration", "no engine in a trace", "trace") for module in (GRPO, RLOO)),
    *(
        _seam(module, "get_act_offloading_ctx_manager", "no streams in a trace", "either")
        for module in (SFT, DPO, REWARD, KTO)
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


def check(trainer_class: Any, generation: Any, version: str) -> None:
    """Raise UnsupportedFramework if names that a probe of this trainer needs are missing."""
    owners = {
        trainer_class.__name__: trainer_class,
        "VLLMGeneration": getattr(generation, "VLLMGeneration", None),
    }
    missing = []
    for seam in SEAMS:
        cls, _, name = seam.name.rpartition(".")
        if seam.use == "probe" and cls in owners and not hasattr(owners[cls], name):
            missing.append(seam.name)
    if missing:
        raise UnsupportedFramework(
            f"TRL {version} has no {', '.join(missing)}, which a probe measures by; releases"
            f" {OLDEST} to {NEWEST} have."
        )
