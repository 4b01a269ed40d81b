"""Vision and audio towers of a config that is not whole."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autotune.catalog.model_lookup import find_model
from autotune.core.errors import BadInput
from autotune.estimate.vision import tower_parameters


@pytest.mark.parametrize("channels", [[128], [128, "32"], 128])
def test_channels_that_are_no_two_numbers_are_refused_by_name(channels: object) -> None:
    config = find_model("gemma-4-E2B").config
    audio = config["audio_config"]
    assert isinstance(audio, Mapping) and tower_parameters(config) > 0
    with pytest.raises(BadInput, match="subsampling_conv_channels"):
        tower_parameters({**config, "audio_config": {**audio, "subsampling_conv_channels": channels}})
