"""Spaces that are predicted completely: the user's own configuration is one of the candidates, and
too many are refused.
"""

from __future__ import annotations

import pytest

from autotune.core.errors import BadInput
from autotune.request.flags import flags_of
from autotune.search import predicted_space
from autotune.search.predicted_space import predict_space

HELD = ["use_vllm=false", "gradient_checkpointing=true", "max_prompt_length=256"]
BASE = {"model": "Qwen2.5-7B", "gpus": "A100-40G", "hold": HELD}


def test_the_start_is_the_configuration_of_the_command() -> None:
    searched = ["per_device_train_batch_size=2,4", "max_completion_length=256,512"]
    space = predict_space(flags_of({**BASE, "num_generations": 8, "search": searched}))
    assert space.start in space.candidates
    assert set(space.predictions) == {candidate.id for candidate in space.candidates}
    batches = {candidate.knobs["per_device_train_batch_size"] for candidate in space.candidates}
    assert {2, 4} <= batches
    assert {candidate.knobs["num_generations"] for candidate in space.candidates} == {8}


def test_the_best_is_the_fastest_that_fits_of_the_preferred_lengths() -> None:
    searched = ["per_device_train_batch_size=2,4", "max_completion_length=512,256"]
    space = predict_space(flags_of({**BASE, "num_generations": 8, "search": searched}))
    assert space.best is not None
    assert space.best.knobs["max_completion_length"] == 512
    assert space.predictions[space.best.id].fits is True


def test_too_many_candidates_are_refused_before_any_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predicted_space, "MAX_CANDIDATES", 3)
    searched = ["per_device_train_batch_size=2,4", "max_completion_length=256,512"]
    # 3 group sizes, 2 micro-batches, 2 lengths; and the defaults, with a micro-batch of 8.
    with pytest.raises(BadInput, match=r"has 13 candidates; --map holds at most 3\.") as refusal:
        predict_space(flags_of({**BASE, "search": searched}))
    assert "--hold K=V" in str(refusal.value.way_out)


def test_unknown_values_are_refused() -> None:
    with pytest.raises(BadInput, match="every setting is known"):
        predict_space(flags_of({**BASE, "unknown": ["num_generations=4,8"]}))
