"""A specification's `sharding`, in the words of DeepSpeed, torch and accelerate, read into ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from autotune.predict.sharding import MIB, Kind, Sharding

KINDS = ("none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
NUMBERS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_model_persistence_threshold": "model_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
    "master_bytes": "master_bytes",
    "frozen_master_bytes": "frozen_master_bytes",
    "reduce_bytes": "reduce_bytes",
}
SWITCHES = {
    "ignores_trainable": "ignores_trainable",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
    "gradient_as_bucket_view": "gradients_are_bucket_views",
    "use_orig_params": "uses_original_parameters",
    "sync_module_states": "synchronises",
    "begins_on_meta": "begins_on_meta",
}


def read(plain: Sharding, given: Mapping[str, object], hidden_size: int | None) -> Sharding:
    """Over the defaults; an option that moves no bytes is passed over."""
    kind = str(given.get("kind", "none"))
    if kind not in KINDS:
        raise ValueError(f"sharding is one of {', '.join(KINDS)}, and {kind!r} is none of them")
    options = _options(given)
    read: dict[str, Any] = {ours: _count(options[name], name, hidden_size) for name, ours in NUMBERS.items() if name in options}
    read |= {ours: _truth(options[name]) for name, ours in SWITCHES.items() if _said(options, name)}
    if kind == "zero3":
        read.setdefault("overlap_comm", True)
    read = _of_torch(options) | read
    read["offload_optimizer"] = _offloaded(options.get("offload_optimizer"))
    read["offload_parameters"] = _offloaded(options.get("offload_param"))
    ranks, rank = given.get("ranks", 1), given.get("rank", 0)
    return replace(plain, kind=cast(Kind, kind), ranks=int(cast(int, ranks)), rank=int(cast(int, rank)), **read)


def _options(given: Mapping[str, object]) -> dict[str, object]:
    """DeepSpeed's `zero_optimization` section may be given whole, or as part of its file; accelerate prefixes FSDP's."""
    options = dict(cast(Mapping[str, object], given.get("options") or {}))
    options.update(cast(Mapping[str, object], options.pop("zero_optimization", None) or {}))
    return {name.removeprefix("fsdp_"): value for name, value in options.items()}


def _said(options: Mapping[str, object], name: str) -> bool:
    return options.get(name) not in (None, "auto")


def _of_torch(options: Mapping[str, object]) -> dict[str, Any]:
    read: dict[str, object] = {}
    if _said(options, "bucket_cap_mb"):
        read["bucket_cap_bytes"] = int(float(str(options["bucket_cap_mb"])) * MIB)
    if str(options.get("mixed_precision", "no")) in ("bf16", "fp16"):
        read["master_bytes"] = 4  # accelerate trains on float32 masters then
    strategy = str(options.get("sharding_strategy", options.get("reshard_after_forward", "FULL_SHARD"))).upper()
    read["reshards_after_forward"] = strategy not in ("SHARD_GRAD_OP", "2", "FALSE")
    read["prefetches_backward"] = str(options.get("backward_prefetch", "BACKWARD_PRE")).upper() in ("BACKWARD_PRE", "1")
    return read


def _count(value: object, name: str, hidden_size: int | None) -> int:
    """`auto` as transformers resolves it (integrations/deepspeed.py), from the model's hidden size."""
    if value != "auto":
        return int(float(str(value)))
    if hidden_size is None:
        raise ValueError(f"{name} is auto, which hangs on the model's hidden size, and that was not given")
    resolved = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    if name not in resolved:
        raise ValueError(f"{name} has no automatic value: give a number")
    return resolved[name]


def _truth(value: object) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes")


def _offloaded(section: object) -> bool:
    return isinstance(section, Mapping) and str(section.get("device", "none")) == "cpu"
