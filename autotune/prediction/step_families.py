"""Families of steps: requests whose traces are equal but for the point, whatever else they say.

`family_key` of screening groups the candidates of one job. The key here also holds between jobs:
it leaves out what no allocation depends on, so that one step model serves a fine-tune of the same
shape, another learning rate and any number of GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autotune.estimate.screening import Point, point_of, traced_request
from autotune.estimate.screening.request_points import (
    MICRO_STEP_CLASSES,
    POINT_SETTINGS,
    Request,
)

SETTINGS_WITHOUT_EFFECT = frozenset(
    """
    learning_rate lr_scheduler_type warmup_ratio warmup_steps seed data_seed
    adam_beta1 adam_beta2 adam_epsilon epsilon
    """.split()
)
"""Numbers that a step computes with, and allocates nothing for."""

CONFIG_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path name_or_path transformers_version torch_dtype dtype initializer_range use_cache
    bos_token_id eos_token_id pad_token_id rope_theta rms_norm_eps max_window_layers use_mrope
    """.split()
)
ROTARY_FAMILIES = frozenset("qwen2 qwen3 qwen3_moe llama mistral smollm3 phi3".split())
"""Model types whose positions are computed: `max_position_embeddings` allocates nothing."""

SHARDED_WHEN_TRACED = ("fsdp1", "fsdp2")
"""Shardings whose traces depend on the number of ranks; a rewriter adds the others' later."""

PLAIN_STEPS = ("none", "ddp")
"""Shardings under which a rank runs the same step."""

SURVEYED_CORNERS = (
    Point(micro_batch=1, prompt=64, completion=64, micro_steps=3),
    Point(micro_batch=8, prompt=512, completion=1024, micro_steps=4),
    Point(micro_batch=16, prompt=2048, completion=4096, micro_steps=64),
)
"""Points whose range a survey covers that is made for a single candidate."""

EXTRAPOLATION = 4
"""How far beyond its range a model is used, as a factor of each coordinate: its formulas are exact
sums of products, and hold at the corner of the range."""


def step_family(request: Request) -> Mapping[str, object]:
    """Return what decides the step of a request, without its point."""
    traced = traced_request(request)
    family: dict[str, object] = {}
    for name, value in traced.items():
        if name not in ("settings", "lengths", "model", "adapter", "sharding"):
            family[name] = value
    family["model"] = _model(traced)
    adapter = traced.get("adapter")
    family["adapter"] = adapter and _without(adapter, ("lora_alpha",))
    family["sharding"] = _sharding(traced["sharding"])

    # 1. Settings, without the point's.
    dropped = POINT_SETTINGS | SETTINGS_WITHOUT_EFFECT
    family["settings"] = _without(traced["settings"], dropped)
    lengths = traced["lengths"]
    family["lengths"] = _without(lengths, ("prompt", "completion"))
    # 2. The course of the micro-steps: their class, and how often a generation is reused.
    family["course"] = min(point_of(request).micro_steps, MICRO_STEP_CLASSES)
    accumulation = traced["settings"].get("gradient_accumulation_steps")
    steps = traced["settings"].get("steps_per_generation")
    family["stale"] = None if steps in (None, accumulation) else (accumulation, steps)
    return family


def points_around(point: Point, known: tuple[Point, ...] = ()) -> list[Point]:
    """Return points whose range a survey for this one covers: the usual range, doubled as often as
    is necessary. `known`: points of a survey before, whose range stays covered.
    """
    low, _, high = SURVEYED_CORNERS
    lowest = Point(*map(min, zip(low, point, *known, strict=True)))
    highest = []
    for usual, *values in zip(high, point, *known, strict=True):
        while usual < max(values):
            usual *= 2
        highest.append(usual)
    corners = (lowest, SURVEYED_CORNERS[1], Point(*highest))
    if point.micro_steps >= MICRO_STEP_CLASSES:
        return [corner._replace(micro_steps=max(3, corner.micro_steps)) for corner in corners]
    return [corner._replace(micro_steps=point.micro_steps) for corner in corners]


def covered(points: Sequence[Point], asked: Sequence[Point]) -> bool:
    """Return True if the points asked for lie within the range of those surveyed, or so near that
    the formulas hold there as well.
    """
    for surveyed, values in zip(zip(*points, strict=True), zip(*asked, strict=True), strict=True):
        if min(values) * EXTRAPOLATION < min(surveyed):
            return False
        if max(values) > EXTRAPOLATION * max(surveyed):
            return False
    steps, asked_steps = points[0].micro_steps, asked[0].micro_steps
    return min(steps, MICRO_STEP_CLASSES) == min(asked_steps, MICRO_STEP_CLASSES)


def _model(request: Request) -> Mapping[str, object]:
    """Return the model's shape and precision. Its name and folder decide nothing, unless it brings
    code.
    """
    model = request["model"]
    dropped = {"name", "layers", "config"}
    if not request.get("trust_remote_code"):
        dropped.add("folder")
    return {**_without(model, dropped), "config": _config(model["config"])}


def _config(config: Mapping[str, Any]) -> Mapping[str, object]:
    dropped = set(CONFIG_WITHOUT_EFFECT)
    if config.get("model_type") in ROTARY_FAMILIES:
        dropped.add("max_position_embeddings")
    if config.get("use_sliding_window") is False:
        dropped |= {"use_sliding_window", "sliding_window"}
    return {name: value for name, value in config.items() if name not in dropped}


def _sharding(sharding: Mapping[str, Any]) -> Mapping[str, object]:
    if sharding["kind"] in SHARDED_WHEN_TRACED:
        return sharding
    kind = sharding["kind"]
    return {"kind": PLAIN_STEPS[-1] if kind in PLAIN_STEPS else kind}


def _without(values: Mapping[str, object], names: Collection[str]) -> Mapping[str, object]:
    return {name: value for name, value in values.items() if name not in names}
