"""A map to test: of a model whose step models the package ships, so that nothing is traced."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from autotune.report.html.map_page import render_map
from autotune.request.flags import Flags, flags_of
from autotune.search.predicted_space import PredictedSpace, predict_space

OPTIONS = {
    "model": "Qwen2.5-7B",
    "gpus": "A100-40G",
    "hold": ["use_vllm=false"],
    "search": [
        "per_device_train_batch_size=2,4,8",
        "num_generations=8,16",
        "max_completion_length=512,1024",
        "max_prompt_length=256,512",
    ],
}


def small_flags() -> Flags:
    return flags_of(OPTIONS)


@cache
def small_space() -> PredictedSpace:
    """3 micro-batches (accumulation follows), 2 group sizes, 2 x 2 lengths, checkpointing on and
    off: 48 candidates.
    """
    return predict_space(small_flags())


def write_page(folder: Path) -> str:
    """Write the map, and return its address."""
    file = folder / "map.html"
    file.write_text(render_map(small_space(), small_flags()))
    return file.as_uri()
