"""Memory of a vision encoder in vLLM's profiling run, which precedes that of the decoder.

N: tokens of the encoder's batch, whole images of the largest size; P: their patches
cache = N · hidden · size · (1 + deepstack levels), live during the decoder's run
tower = P · size · (2 · d + max(3 · m, 6 · d))
d: hidden size of the tower, m: MLP width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.estimate import image_tokens
from autotune.estimate.config_fields import Config, number


@dataclass(frozen=True, kw_only=True)
class EncoderUse:
    """Bytes of the encoder in the profiling run."""

    cache: int = 0  # its outputs
    tower: int = 0  # peak of its forward pass


def profiled(config: Config, size: int, *, hidden: int, tokens: int) -> EncoderUse:
    """Return what an engine of `tokens` per batch profiles; nothing for a language model."""
    image, patches = image_tokens.largest(config)
    vision = config.get("vision_config")
    if not image or not isinstance(vision, Mapping):
        return EncoderUse()
    images = max(tokens, image) // image
    levels = vision.get("deepstack_visual_indexes")
    width, wide = number(vision, "hidden_size"), number(vision, "intermediate_size", 3420)
    return EncoderUse(
        cache=images * image * hidden * size * (1 + (len(levels) if isinstance(levels, list | tuple) else 0)),
        tower=images * patches * size * (2 * width + max(3 * wide, 6 * width)),
    )
