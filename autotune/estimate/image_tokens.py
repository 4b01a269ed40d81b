"""Tokens of an image in a vision-language model, by the rules of its processor.

h, w: pixels of the image. A test compares the tokens with transformers' own processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.core.dataset import Images
from autotune.core.errors import BadInput
from autotune.core.files import read_loose_json
from autotune.core.space import KnobValue
from autotune.estimate.config_fields import Config, number

LARGEST_SIDE = 2**15  # pixels: every processor makes such an image smaller

MAX_PREPROCESSOR_BYTES = 1_000_000

Options = dict[str, KnobValue | Mapping[str, int]]
Rule = Callable[[Config, Config, int, int], tuple[int, Options]]
"""(config, preprocessor_config.json, h, w) -> tokens, options of the image processor."""


def images_of(config: Config, folder: Path | None, *, count: int, width: int, height: int) -> Images:
    """Return a row's images as the model's processor sees them."""
    kind = str(config.get("model_type"))
    if not isinstance(config.get("vision_config"), Mapping):
        raise BadInput(f"--image-size: {kind} is a language model, and reads no images.", way_out="Leave it out.")
    if kind not in _RULES:
        raise BadInput(
            f"--image-size: the tokens of an image are not known for {kind}.",
            way_out=f"Leave it out, or use one of {', '.join(sorted(_RULES))}.",
        )
    file = None if folder is None else folder / "preprocessor_config.json"
    stated: object = None
    if file is not None and file.is_file():
        stated = read_loose_json(file, largest_bytes=MAX_PREPROCESSOR_BYTES, way_out="Save or download the model again.")
    tokens, options = _RULES[kind](config, stated if isinstance(stated, dict) else {}, height, width)
    return Images(count=count, width=width, height=height, tokens=tokens, processor=options)


def largest(config: Config) -> tuple[int, int]:
    """Return tokens and patches of the largest image; zeros if they are not known, or for a language model."""
    kind = str(config.get("model_type"))
    if kind not in _RULES or not isinstance(config.get("vision_config"), Mapping):
        return 0, 0
    vision = _vision(config)
    if kind == "gemma3":
        return number(config, "mm_tokens_per_image", 256), (number(vision, "image_size") // number(vision, "patch_size")) ** 2
    name, usual = ("pooling_kernel_size", 3) if kind.startswith("gemma4") else ("spatial_merge_size", 2)
    pooled = number(vision, name, usual)
    tokens, _ = _RULES[kind](config, {}, LARGEST_SIDE, LARGEST_SIDE)
    return tokens, tokens * pooled**2


def _vision(config: Config) -> Config:
    vision = config["vision_config"]
    assert isinstance(vision, Mapping)
    return vision


def _multiples(least_pixels: int, most_pixels: int, patch: int) -> Rule:
    """Sides are rounded to multiples of patch · merge, and scaled until h · w is within its bounds."""

    def rule(config: Config, preprocessor: Config, height: int, width: int) -> tuple[int, Options]:
        vision = _vision(config)
        side, merge = number(vision, "patch_size", patch), number(vision, "spatial_merge_size", 2)
        size = preprocessor.get("size")
        edges = size if isinstance(size, Mapping) else {}
        least = number(preprocessor, "min_pixels", number(edges, "shortest_edge", least_pixels))
        most = number(preprocessor, "max_pixels", number(edges, "longest_edge", most_pixels))
        options: Options = {"patch_size": side, "merge_size": merge, "temporal_patch_size": 2}
        options |= {"min_pixels": least, "max_pixels": most}
        factor = side * merge
        high, wide = (max(factor, round(pixels / factor) * factor) for pixels in (height, width))
        if high * wide > most:
            scale = math.sqrt(height * width / most)
            high, wide = (max(factor, math.floor(pixels / scale / factor) * factor) for pixels in (height, width))
        elif high * wide < least:
            scale = math.sqrt(least / (height * width))
            high, wide = (math.ceil(pixels * scale / factor) * factor for pixels in (height, width))
        return high * wide // factor**2, options

    return rule


def _fixed(config: Config, preprocessor: Config, height: int, width: int) -> tuple[int, Options]:
    """Every image has one size and one number of tokens."""
    side = number(_vision(config), "image_size")
    return number(config, "mm_tokens_per_image", 256), {"size": {"height": side, "width": side}}


def _fitted(config: Config, preprocessor: Config, height: int, width: int) -> tuple[int, Options]:
    """The largest size of these proportions within a number of patches, pooled."""
    vision = _vision(config)
    patch, pool = number(vision, "patch_size", 16), number(vision, "pooling_kernel_size", 3)
    tokens = number(config, "vision_soft_tokens_per_image", number(vision, "num_soft_tokens", 280))
    side = patch * pool
    scale = math.sqrt(tokens * side * side / (height * width))
    high, wide = (max(1, math.floor(scale * pixels / side)) for pixels in (height, width))
    options: Options = {"patch_size": patch, "pooling_kernel_size": pool, "max_soft_tokens": tokens}
    return min(tokens, high * wide), options


# Bounds of the models' preprocessor_config.json on the hub (Qwen/Qwen2.5-VL-7B-Instruct, Qwen/Qwen3-VL-8B-Instruct).
_QWEN2 = _multiples(56 * 56, 28 * 28 * 16384, 14)
_QWEN3 = _multiples(256 * 256, 4096 * 4096, 16)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "gemma3": _fixed,
    **dict.fromkeys(("gemma4", "gemma4_unified"), _fitted),
}
