"""Images in a vision-language model: parameters and memory of its towers, tokens of an image by the
rules of its processor.

    d  hidden size    m  MLP width    h  hidden size of the language model    k  merged side

Tests compare the sums with transformers' own models, the tokens with its processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.core.dataset import Images
from autotune.core.errors import BadInput
from autotune.core.files import read_loose_json
from autotune.core.space import KnobValue
from autotune.estimate.model_config import Config, number, numbers

# Parameters.


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


# Memory in an engine.


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
    width = number(vision, "hidden_size")
    mlp_width = number(vision, "intermediate_size", 3420)
    outputs = 1 + _deepstack_levels(vision)
    cache = images * image_tokens * hidden * size * outputs
    tower = images * image_patches * size * (2 * width + max(3 * mlp_width, 6 * width))
    return cache, tower


# Tokens of an image.

LARGEST_SIDE = 2**15  # pixels: every processor makes such an image smaller
MAX_PREPROCESSOR_BYTES = 1_000_000

ImageOptions = dict[str, KnobValue | Mapping[str, int]]

Rule = Callable[[Config, Config, int, int], tuple[int, ImageOptions]]
"""(config, preprocessor_config.json, height, width in pixels) -> tokens, options of the image
processor.
"""


def images_of(
    config: Config,
    folder: Path | None,
    *,
    count: int,
    width: int,
    height: int,
) -> Images:
    """Return a row's images as the model's processor sees them."""
    kind = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), Mapping):
        raise BadInput(
            f"--image-size: {kind} is a language model, and reads no images.",
            way_out="Leave it out.",
        )
    if kind not in _RULES:
        raise BadInput(
            f"--image-size: the tokens of an image are not known for {kind}.",
            way_out=f"Leave it out, or use one of {', '.join(sorted(_RULES))}.",
        )
    tokens, options = _RULES[kind](config, _preprocessor(folder), height, width)
    return Images(
        count=count,
        width=width,
        height=height,
        tokens=tokens,
        processor=options,
    )


def _preprocessor(folder: Path | None) -> Config:
    """Return the content of preprocessor_config.json; empty if it is not there."""
    if folder is None:
        return {}
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return {}
    stated = read_loose_json(
        file, largest_bytes=MAX_PREPROCESSOR_BYTES, way_out="Save or download the model again."
    )
    return stated if isinstance(stated, dict) else {}


def largest(config: Config) -> tuple[int, int]:
    """Return tokens and patches of the largest image; zeros if they are not known, or for a
    language model.
    """
    kind = str(config.get("model_type"))
    if kind not in _RULES or not isinstance(config.get("vision_config"), Mapping):
        return 0, 0
    vision = _vision(config)
    if kind == "gemma3":
        patches = number(vision, "image_size") // number(vision, "patch_size")
        return number(config, "mm_tokens_per_image", 256), patches**2
    if kind.startswith("gemma4"):
        pooled = number(vision, "pooling_kernel_size", 3)
    else:
        pooled = number(vision, "spatial_merge_size", 2)
    tokens, _ = _RULES[kind](config, {}, LARGEST_SIDE, LARGEST_SIDE)
    return tokens, tokens * pooled**2


def _vision(config: Config) -> Config:
    vision = config["vision_config"]
    assert isinstance(vision, Mapping)
    return vision


def _multiples(
    least_pixels: int,
    most_pixels: int,
    patch: int,
) -> Rule:
    """Sides are rounded to multiples of patch · merge, and scaled until height · width is within
    its bounds.
    """

    def rule(
        config: Config,
        preprocessor: Config,
        height: int,
        width: int,
    ) -> tuple[int, ImageOptions]:
        vision = _vision(config)
        side = number(vision, "patch_size", patch)
        merge = number(vision, "spatial_merge_size", 2)
        size = preprocessor.get("size")
        edges = size if isinstance(size, Mapping) else {}
        smallest_area = number(
            preprocessor, "min_pixels", number(edges, "shortest_edge", least_pixels)
        )
        largest_area = number(
            preprocessor, "max_pixels", number(edges, "longest_edge", most_pixels)
        )
        factor = side * merge
        high, wide = _scaled(height, width, factor, smallest_area, largest_area)
        options: ImageOptions = {
            "patch_size": side,
            "merge_size": merge,
            "temporal_patch_size": 2,
            "min_pixels": smallest_area,
            "max_pixels": largest_area,
        }
        return high * wide // factor**2, options

    return rule


def _scaled(
    height: int,
    width: int,
    factor: int,
    least_pixels: int,
    most_pixels: int,
) -> tuple[int, int]:
    """Return the sides as multiples of the factor, with least to most pixels together."""

    def rounded(pixels: int) -> int:
        return max(factor, round(pixels / factor) * factor)

    def smaller(pixels: int) -> int:
        scale = math.sqrt(height * width / most_pixels)
        return max(factor, math.floor(pixels / scale / factor) * factor)

    def larger(pixels: int) -> int:
        scale = math.sqrt(least_pixels / (height * width))
        return math.ceil(pixels * scale / factor) * factor

    pixels = rounded(height) * rounded(width)
    if pixels > most_pixels:
        return smaller(height), smaller(width)
    if pixels < least_pixels:
        return larger(height), larger(width)
    return rounded(height), rounded(width)


def _fixed(
    config: Config,
    preprocessor: Config,
    height: int,
    width: int,
) -> tuple[int, ImageOptions]:
    """Return the one number of tokens that every image has, and the one size."""
    side = number(_vision(config), "image_size")
    return number(config, "mm_tokens_per_image", 256), {"size": {"height": side, "width": side}}


def _fitted(
    config: Config,
    preprocessor: Config,
    height: int,
    width: int,
) -> tuple[int, ImageOptions]:
    """Return the tokens of the largest size of these proportions within a number of patches,
    pooled.
    """
    vision = _vision(config)
    patch = number(vision, "patch_size", 16)
    pool = number(vision, "pooling_kernel_size", 3)
    most_tokens = number(
        config, "vision_soft_tokens_per_image", number(vision, "num_soft_tokens", 280)
    )
    side = patch * pool
    scale = math.sqrt(most_tokens * side * side / (height * width))
    rows = max(1, math.floor(scale * height / side))
    columns = max(1, math.floor(scale * width / side))
    options: ImageOptions = {
        "patch_size": patch,
        "pooling_kernel_size": pool,
        "max_soft_tokens": most_tokens,
    }
    return min(most_tokens, rows * columns), options


# Bounds of the models' preprocessor_config.json on the hub (Qwen/Qwen2.5-VL-7B-Instruct,
# Qwen/Qwen3-VL-8B-Instruct).
_QWEN2 = _multiples(56 * 56, 28 * 28 * 16384, 14)

_QWEN3 = _multiples(256 * 256, 4096 * 4096, 16)

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "gemma3": _fixed,
    **dict.fromkeys(("gemma4", "gemma4_unified"), _fitted),
}
