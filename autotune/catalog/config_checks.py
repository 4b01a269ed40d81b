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
        elif name in LARGEST_SIZES and isinstance(value, int | float | str):
            if not isinstance(value, int) or not 1 <= value <= LARGEST_SIZES[name]:
                raise BadInput(
                    f"{path}: {name} is no whole number from 1 to {LARGEST_SIZES[name]}.",
                    way_out=REAL_CONFIG,
                )
        elif name in ("dtype", "torch_dtype") and not isinstance(value, str | None):
            raise BadInput(f"{path}: {name} is {value}, not a name.", way_out=REAL_CONFIG)
        elif name == "weight_block_size" and not _is_block_size(value):
            raise BadInput(
                f"{path}: {name} is {value}, not two whole numbers from 1.", way_out=REAL_CONFIG
            )
        elif isinstance(value, float) and name.endswith("factor"):
            if not abs(value) <= LARGEST_FACTOR:  # true for NaN
                raise BadInput(f"{path}: {name} is {value}.", way_out=REAL_CONFIG)
        elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise BadInput(
                f"{path}: {name} is an integer of more than 64 bits.",
                way_out=REAL_CONFIG,
            )
    layers = config.get("num_hidden_layers")
    for name in LISTS_PER_LAYER:
        entries = config.get(name)
        if not isinstance(entries, list) or not isinstance(layers, int):
            continue
        if len(entries) != layers:
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
