"""Tokens of an image by the rules of a model's processor, and the size that has the most.

Tests compare them with transformers' own processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.core.dataset import Images
from autotune.core.errors import BadInput
from autotune.core.files import read_loose_json
from autotune.core.space import KnobValue
from autotune.estimate.model_config import Config, number

LARGEST_SIDE = 2**15  # pixels: every processor makes such an image smaller

MAX_PREPROCESSOR_BYTES = 1_000_000

ImageOptions = dict[str, KnobValue | Mapping[str, int]]

Rule = Callable[[Config, Config, int, int], tuple[int, ImageOptions]]
"""(config, preprocessor_config.json, height, width in pixels) -> tokens, options of the image
processor.
"""


def vision_section(config: Config) -> Config:
    vision = config["vision_config"]
    assert isinstance(vision, Mapping)
    return vision


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
    vision = vision_section(config)
    if kind == "gemma3":
        patches = number(vision, "image_size") // number(vision, "patch_size")
        return number(config, "mm_tokens_per_image", 256), patches**2
    if kind.startswith("gemma4"):
        pooled = number(vision, "pooling_kernel_size", 3)
    else:
        pooled = number(vision, "spatial_merge_size", 2)
    tokens, _ = _RULES[kind](config, {}, LARGEST_SIDE, LARGEST_SIDE)
    return tokens, tokens * pooled**2


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
        vision = vision_section(config)
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
    side = number(vision_section(config), "image_size")
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
    vision = vision_section(config)
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
