"""Steps of vision-language models, to trace and to count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.estimate.vision_images import images_of
from tests.counted_memory.cases import EVERYWHERE, LORA, NON_REENTRANT, SHAPE, spec

TEXT = {name: value for name, value in SHAPE.items() if name != "model_type"}
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
    "out_hidden_size": 128,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
IMAGE_ID = 1000

MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-vl": {
        **TEXT,
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": IMAGE_ID,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_config": {
            **TOWER,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "in_chans": 3,
        },
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": IMAGE_ID,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [4, 6, 6],
                "rope_type": "default",
            },
        },
        "vision_config": {
            **TOWER,
            "patch_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 256,
            "in_channels": 3,
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_ID,
        "boi_token_index": IMAGE_ID + 1,
        "eoi_token_index": IMAGE_ID + 2,
        "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 48},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 112,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
}


def with_images(
    method: str, model: str, *, count: int = 1, side: int = 168, **changes: Any
) -> dict[str, Any]:
    """Return a specification whose rows have images."""
    config = MODELS[model]
    images = dataclasses.asdict(
        images_of(
            config,
            None,
            count=count,
            width=side,
            height=side,
        )
    )
    return {
        **spec(method, config=config, **{"prompt": 160, "completion": 24, **changes}),
        "images": images,
    }


CASES: Mapping[str, dict[str, Any]] = {
    "sft, qwen2.5-vl": with_images("sft", "qwen2.5-vl"),
    "sft, qwen3-vl, checkpointing, two images": with_images(
        "sft", "qwen3-vl", count=2, **NON_REENTRANT
    ),
    "sft, gemma3, lora everywhere, autocast": with_images(
        "sft", "gemma3", adapter=EVERYWHERE, bf16=True
    ),
    "grpo, qwen2.5-vl, lora": with_images(
        "grpo", "qwen2.5-vl", adapter=LORA, per_device_train_batch_size=2
    ),
    "grpo, qwen3-vl, reference model": with_images(
        "grpo", "qwen3-vl", beta=0.04, per_device_train_batch_size=2
    ),
    "rloo, gemma3, checkpointing": with_images(
        "rloo", "gemma3", per_device_train_batch_size=2, **NON_REENTRANT
    ),
}
