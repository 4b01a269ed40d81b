"""Precision of a model's weights, as TRL and vLLM derive it from a setting and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

TORCH_DTYPES = ("bfloat16", "float16", "float32")
BY_CHECKPOINT = (None, "auto")
"""Values of `dtype` under which transformers loads the precision of the checkpoint."""


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """Return the precision that config.json names; transformers' own default is float32."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        named = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if named in TORCH_DTYPES:
            return named
    return "float32"


def loaded_dtype(dtype: object, config: Mapping[str, object]) -> str:
    """Return the precision in which the trainer loads the weights."""
    return checkpoint_dtype(config) if dtype in BY_CHECKPOINT else str(dtype).removeprefix("torch.")


def engine_dtype(config: Mapping[str, object]) -> str:
    """Return the precision of vLLM's weights, which TRL leaves to vLLM: half precision always."""
    named = checkpoint_dtype(config)
    return "bfloat16" if named == "float32" else named
