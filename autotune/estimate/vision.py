"""Towers of a vision-language model: their parameters, and their memory in an engine.

    d  hidden size    m  MLP width    h  hidden size of the language model    k  merged side

Tests compare the sums with transformers' own models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.core.errors import BadInput
from autotune.estimate.model_config import Config, number, numbers
from autotune.estimate.vision_images import largest


def tower_parameters(config: Config) -> int:
    """Return the parameters of all towers of a multimodal config; 0 for a language model."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return _audio(config)
    text = config.get("text_config")
    text_hidden = number(text if isinstance(text, Mapping) else config, "hidden_size")
    kind = str(vision.get("model_type", config.get("model_type")))
    if kind not in _TOWERS:
        raise BadInput(
            f"No shape is known for the vision tower {kind!r}.",
            way_out="Give the language model's config alone.",
        )
    return _TOWERS[kind](vision, text_hidden) + _audio(config)


def _plain_layer(hidden: int, width: int) -> int:
    """Four projections, a plain MLP and two layer norms, all with biases."""
    projections = 4 * hidden * (hidden + 1)
    mlp = 2 * hidden * width + width + hidden
    norms = 4 * hidden
    return projections + mlp + norms


def _siglip(vision: Config, text_hidden: int) -> int:
    """SigLIP with Gemma 3's projection."""
    hidden, width, patch = numbers(vision, "hidden_size", "intermediate_size", "patch_size")
    side = number(vision, "image_size") // patch
    pixels = number(vision, "num_channels", 3) * patch * patch
    patches = hidden * (pixels + 1) + side * side * hidden
    layers = number(vision, "num_hidden_layers") * _plain_layer(hidden, width)
    projection = hidden * text_hidden + hidden
    return patches + layers + 2 * hidden + projection


def _qwen2_vl(vision: Config, text_hidden: int) -> int:
    """Layer norms and a plain MLP; `hidden_size` is the width of the text."""
    tower = _in_usual_names(vision)
    hidden, width = numbers(tower, "hidden_size", "intermediate_size")
    layers = number(vision, "depth", 32) * _plain_layer(hidden, width)
    return _patches(tower, 14) + layers + 2 * hidden + _merger(tower, text_hidden)


def _in_usual_names(vision: Config) -> Config:
    """Return the tower of Qwen2-VL with its width as `hidden_size`; any other unchanged."""
    if "embed_dim" not in vision:
        return vision
    width = number(vision, "embed_dim")
    mlp_width = width * number(vision, "mlp_ratio", 4)
    return {**vision, "hidden_size": width, "intermediate_size": mlp_width}


def _qwen2_5_vl(vision: Config, text_hidden: int) -> int:
    """RMS norms and a gated MLP; merger: 4d·4d + 4d·h."""
    hidden = number(vision, "hidden_size")
    width = number(vision, "intermediate_size", 3420)
    projections = 4 * hidden * (hidden + 1)
    mlp = 3 * hidden * width + 2 * width + hidden
    norms = 2 * hidden
    layers = number(vision, "depth", 32) * (projections + mlp + norms)
    return _patches(vision, 14) + layers + hidden + _merger(vision, text_hidden)


def _qwen3_vl(vision: Config, text_hidden: int) -> int:
    """Layer norms and a plain MLP, positions, and a merger beside each layer of DeepStack."""
    hidden, width = numbers(vision, "hidden_size", "intermediate_size")
    merged = hidden * number(vision, "spatial_merge_size", 2) ** 2
    merger = _merger(vision, text_hidden)
    deep_mergers = _deepstack_levels(vision) * (2 * merged + merger)
    positions = number(vision, "num_position_embeddings", 2304) * hidden
    outside = _patches(vision, 16) + hidden + positions
    layers = number(vision, "depth") * _plain_layer(hidden, width)
    return outside + layers + 2 * hidden + merger + deep_mergers


def _deepstack_levels(vision: Config) -> int:
    levels = vision.get("deepstack_visual_indexes")
    return len(levels) if isinstance(levels, list | tuple) else 0


def _patches(vision: Config, default_side: int) -> int:
    """Projection of a patch: d · channels · frames · side²."""
    channels = number(vision, "in_channels", number(vision, "in_chans", 3))
    side = number(vision, "patch_size", number(vision, "spatial_patch_size", default_side))
    frames = number(vision, "temporal_patch_size", 2)
    return number(vision, "hidden_size") * channels * frames * side * side


def _merger(vision: Config, text_hidden: int) -> int:
    """(k²d)² + k²d·h with biases; k² patches become one token."""
    merged = number(vision, "hidden_size") * number(vision, "spatial_merge_size", 2) ** 2
    return merged * (merged + 1) + (merged + 1) * number(vision, "out_hidden_size", text_hidden)


def _gemma4(vision: Config, text_hidden: int) -> int:
    """Four norms per layer, norms per head of queries and keys, a gated MLP, two position
    tables.
    """
    hidden, width, patch = numbers(vision, "hidden_size", "intermediate_size", "patch_size")
    heads = number(vision, "num_attention_heads")
    head_dim = number(vision, "head_dim", hidden // heads)
    queries = heads * head_dim
    keys = number(vision, "num_key_value_heads") * head_dim

    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * head_dim
    layer = attention + 3 * hidden * width + 4 * hidden
    positions = 2 * number(vision, "position_embedding_size") * hidden
    patches = 3 * patch * patch * hidden + positions
    return patches + number(vision, "num_hidden_layers") * layer + hidden * text_hidden


def _gemma4_unified(vision: Config, text_hidden: int) -> int:
    """No encoder: pixels of a token in one projection with three norms, a position table for
    each axis.
    """
    width, projected = numbers(vision, "mm_embed_dim", "output_proj_dims")
    side = number(vision, "patch_size", 16) * number(vision, "pooling_kernel_size", 3)
    pixels = 3 * side * side
    projection = pixels * width + width
    norms = 2 * pixels + 4 * width
    positions = 2 * number(vision, "mm_posemb_size") * width
    return projection + norms + positions + projected * text_hidden


def _llama4(vision: Config, text_hidden: int) -> int:
    hidden, width, patch = numbers(vision, "hidden_size", "intermediate_size", "patch_size")
    places = (number(vision, "image_size") // patch) ** 2 + 1
    pixels = number(vision, "num_channels", 3) * patch * patch
    patches = pixels * hidden + hidden + places * hidden
    first, second = numbers(vision, "projector_input_dim", "projector_output_dim")
    adapter = width * first + second * second
    projection = number(vision, "vision_output_dim") * text_hidden
    layers = number(vision, "num_hidden_layers") * _plain_layer(hidden, width)
    return patches + 4 * hidden + layers + adapter + projection


_QWEN3_TOWERS = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
)
_TOWERS: Mapping[str, Callable[[Config, int], int]] = {
    "siglip_vision_model": _siglip,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    **dict.fromkeys(_QWEN3_TOWERS, _qwen3_vl),
    "gemma4_vision": _gemma4,
    "gemma4_unified_vision": _gemma4_unified,
    "llama4_vision_model": _llama4,
}


def _audio(config: Config) -> int:
    """Gemma 4's conformer with its projection; the projection alone in a model without encoders."""
    audio = config.get("audio_config")
    text = config.get("text_config")
    if not isinstance(audio, Mapping) or not isinstance(text, Mapping):
        return 0
    if audio.get("model_type") == "gemma4_unified_audio":
        return number(audio, "output_proj_dims") * number(text, "hidden_size")
    hidden, out = numbers(audio, "hidden_size", "output_proj_dims")
    heads = number(audio, "num_attention_heads")
    kernel = number(audio, "conv_kernel_size")

    feed_forward = 2 * 4 * hidden * hidden + 2 * hidden
    attention = 5 * hidden * hidden + hidden // heads
    convolution = 3 * hidden * hidden + kernel * hidden + 2 * hidden
    layer = 2 * feed_forward + attention + convolution + 3 * hidden
    projection = hidden * out + out + out * number(text, "hidden_size")
    layers = number(audio, "num_hidden_layers") * layer
    return _subsampling(audio, hidden) + projection + layers


def _subsampling(audio: Config, hidden: int) -> int:
    """Two convolutions of 3 x 3 with norms, and a projection of a quarter of the bands."""
    match audio.get("subsampling_conv_channels"):
        case None:
            first, second = 128, 32
        case [int(first), int(second)]:
            pass
        case _:
            raise BadInput(
                "The model's config states no two numbers as subsampling_conv_channels.",
                way_out="Give the whole config.json of the model.",
            )
    convolutions = 9 * first + first + 9 * first * second + second
    return convolutions + first // 4 * second * hidden


def profiled_encoder(
    config: Config,
    size: int,
    *,
    hidden: int,
    tokens: int,
) -> tuple[int, int]:
    """Return the bytes of the encoder's outputs (cache) and the peak of its forward pass (tower),
    which vLLM profiles before the decoder, at `tokens` per batch; zeros for a language model.

    N: tokens of the encoder's batch, whole images of the largest size; P: their patches
    cache = N · hidden · size · (1 + deepstack levels), held during the decoder's run
    tower = P · size · (2 · d + max(3 · m, 6 · d))
    """
    image_tokens, image_patches = largest(config)
    vision = config.get("vision_config")
    if not image_tokens or not isinstance(vision, Mapping):
        return 0, 0
    images = max(tokens, image_tokens) // image_tokens
    shape = _in_usual_names(vision)
    width = number(shape, "hidden_size")
    mlp_width = number(shape, "intermediate_size", 3420)
    outputs = 1 + _deepstack_levels(vision)
    cache = images * image_tokens * hidden * size * outputs
    tower = images * image_patches * size * (2 * width + max(3 * mlp_width, 6 * width))
    return cache, tower
