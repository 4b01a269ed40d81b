"""Sizes of a config.json that no model has: refused before anything counts up to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.errors import BadInput

REAL_CONFIG = "Give the config.json of a real model."

# Field of a config.json -> largest value; the smallest is 1.
LARGEST_SIZES = {
    "num_hidden_layers": 2_000,
    "n_layer": 2_000,
    "hidden_size": 2**20,
    "n_embd": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**14,
    "n_head": 2**14,
    "num_key_value_heads": 2**14,
    "vocab_size": 2**28,
    "decoder_sparse_step": 2_000,
    "sliding_window_pattern": 2_000,
    "full_attention_interval": 2_000,
    "interleave_moe_layer_step": 2_000,
    "depth": 2_000,
    "num_heads": 2**14,
    "patch_size": 2**14,
    "image_size": 2**14,
    "temporal_patch_size": 2**14,
    "spatial_merge_size": 2**14,
    "pooling_kernel_size": 2**14,
    "max_position_embeddings": 2**30,
}

LARGEST_INTEGER = 2**63  # bound of all other integers
LARGEST_FACTOR = 1e9  # bound of fields that other sizes are multiplied by

# Fields of a config.json with one entry per layer.
LISTS_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


def check_sizes(config: Mapping[str, object], path: Path) -> None:
    """Refuse sizes that no model has, before anything counts up to them."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value, path)
            continue
        problem = _problem_of(name, value)
        if problem is not None:
            raise BadInput(
                f"{path}: {name} is {problem}.",
                way_out=REAL_CONFIG,
            )
    _check_lists_per_layer(config, path)


def _problem_of(name: str, value: object) -> str | None:
    """Return what a value is instead of its field's; None: it may be of a model."""
    if name in LARGEST_SIZES and isinstance(value, int | float | str):
        largest = LARGEST_SIZES[name]
        if isinstance(value, int) and 1 <= value <= largest:
            return None
        return f"no whole number from 1 to {largest}"
    if name in ("dtype", "torch_dtype") and not isinstance(value, str | None):
        return f"{value}, not a name"
    if name == "weight_block_size" and not _is_block_size(value):
        return f"{value}, not two whole numbers from 1"
    if isinstance(value, float):
        is_too_large = not abs(value) <= LARGEST_FACTOR  # true for NaN
        if is_too_large and name.endswith("factor"):
            return str(value)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "an integer of more than 64 bits"
    return None


def _check_lists_per_layer(config: Mapping[str, object], path: Path) -> None:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    for name in LISTS_PER_LAYER:
        entries = config.get(name)
        if isinstance(entries, list) and len(entries) != layers:
            raise BadInput(
                f"{path}: {name} has {len(entries)} entries for {layers} layers.",
                way_out=REAL_CONFIG,
            )


def _is_block_size(value: object) -> bool:
    """Return True for the rows and columns of a quantised block, and for None: no blocks."""
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(size, int) and size >= 1 for size in value)
