"""Towers of vision-language models against transformers, and tokens of images against its
processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog.model_lookup import find_model
from autotune.core.errors import BadInput
from autotune.estimate import model_shape, vision, vision_images
from autotune.estimate.vision import tower_parameters


@pytest.mark.parametrize("channels", [[128], [128, "32"], 128])
def test_channels_that_are_no_two_numbers_are_refused_by_name(channels: object) -> None:
    config = find_model("gemma-4-E2B").config
    audio = config["audio_config"]
    assert isinstance(audio, Mapping) and tower_parameters(config) > 0
    with pytest.raises(BadInput, match="subsampling_conv_channels"):
        tower_parameters(
            {**config, "audio_config": {**audio, "subsampling_conv_channels": channels}}
        )


SIZES = [(448, 448), (1024, 768), (37, 2000), (28, 28), (5000, 4000), (300, 200)]

MODELS = [
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct",
    "google/gemma-4-E2B",
    "google/gemma-4-12B",
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_an_image_has_as_many_tokens_as_its_processor_makes(
    name: str, size: tuple[int, int]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    config, (width, height) = find_model(name).config, size
    images = vision_images.images_of(
        config,
        None,
        count=1,
        width=width,
        height=height,
    )
    if "gemma" in name:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        patch, pool = 16, 3
        high, wide = get_aspect_ratio_preserving_size(height, width, patch, 280 * pool**2, pool)
        assert images.tokens == high * wide // (patch * pool) ** 2
        return
    processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
        **images.processor
    )
    patches = processor.get_number_of_image_patches(height, width, {})
    assert images.tokens == patches // 4


def test_gemma_3_gives_every_image_the_same_number() -> None:
    config = find_model("google/gemma-3-4b-it").config
    for width in (100, 3000):
        images = vision_images.images_of(
            config,
            None,
            count=2,
            width=width,
            height=200,
        )
        assert (images.tokens, images.row_tokens) == (256, 512)


def test_the_folders_own_bounds_apply(tmp_path: Any) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 200704}')
    config = find_model(MODELS[0]).config
    assert (
        vision_images.images_of(
            config,
            tmp_path,
            count=1,
            width=2000,
            height=2000,
        ).tokens
        == 200704 // 28**2
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Qwen3-8B", "language model"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "not known"),
    ],
)
def test_models_without_a_rule_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        vision_images.images_of(
            find_model(name).config,
            None,
            count=1,
            width=448,
            height=448,
        )


def test_an_engine_profiles_the_largest_images_its_batch_holds() -> None:
    config = find_model("google/gemma-3-4b-it").config
    hidden = model_shape.shape(config).hidden
    assert vision.profiled_encoder(config, 2, hidden=hidden, tokens=4096)[0] == 4096 * hidden * 2
    assert (
        vision.profiled_encoder(find_model("Qwen/Qwen3-8B").config, 2, hidden=4096, tokens=4096)[1]
        == 0
    )


def test_a_broken_preprocessor_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{broken")
    config = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}}
    with pytest.raises(BadInput, match=r"preprocessor_config\.json cannot be read"):
        vision_images.images_of(
            config,
            tmp_path,
            count=1,
            width=448,
            height=448,
        )
