"""Trace requests as points of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from autotune.core.space import fingerprint
from autotune.estimate.screening.points import Point

Request: TypeAlias = Mapping[str, Any]

POINT_SETTINGS = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "max_completion_length",
        "max_length",
        "num_generations",
    }
)
"""Settings that vary inside a family (the group size changes a few numbers per prompt)."""

WHOLE_WEIGHTS = ("zero1", "zero2")
"""Stages of ZeRO that leave the modules unchanged; under the third they save other tensors."""

MICRO_STEP_CLASSES = 4
"""Micro-steps of which more change nothing: points with 1, 2, 3 or at least 4 have other events."""


def family_key(request: Request) -> str:
    """Return a fingerprint of everything but the point, with the class of its micro-steps. Points
    of one class have the same events.
    """
    settings = dict(request["settings"])
    stale = stale_generation(request)
    for name in POINT_SETTINGS:
        settings.pop(name, None)
    course = min(point_of(request).micro_steps, MICRO_STEP_CLASSES)
    key = {**request, "settings": settings, "course": course, "stale": stale}
    del key["lengths"]
    return fingerprint(key)


def traced_request(request: Request) -> Request:
    """Return the request to trace: ZeRO's buckets, shards and offloading are added afterwards."""
    sharding = request["sharding"]
    kind = sharding["kind"]
    if kind in WHOLE_WEIGHTS:
        kind = WHOLE_WEIGHTS[-1]
    elif kind != "zero3":
        return request
    return {**request, "sharding": {"kind": kind, "ranks": sharding["ranks"]}}


def point_of(request: Request) -> Point:
    """Return the point of a request."""
    settings = request["settings"]
    lengths = request["lengths"]
    steps = settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps")
    return Point(
        micro_batch=settings["per_device_train_batch_size"],
        prompt=lengths["prompt"],
        completion=lengths["completion"],
        micro_steps=steps or 1,
    )


def request_at(
    request: Request,
    point: Point,
    layers: int | None,
) -> Request:
    """Return the request at another point, in a number of layers (None: all)."""
    # 1. Batch.
    settings = dict(request["settings"])
    steps = settings.get("steps_per_generation")
    settings["per_device_train_batch_size"] = point.micro_batch
    if steps in (None, settings.get("gradient_accumulation_steps")):
        settings["gradient_accumulation_steps"] = point.micro_steps
    if steps is not None:
        settings["steps_per_generation"] = point.micro_steps
    if "num_generations" in settings:
        batch = point.micro_batch * point.micro_steps * request["sharding"]["ranks"]
        settings["num_generations"] = _group_size(settings["num_generations"], batch)
    # 2. Lengths.
    if "max_completion_length" in settings:
        settings["max_completion_length"] = point.completion
    if "max_length" in settings:
        settings["max_length"] = point.prompt + point.completion
    lengths = {**request["lengths"], "prompt": point.prompt, "completion": point.completion}
    # 3. Depth.
    model = {**request["model"], "layers": layers}
    return {**request, "settings": settings, "lengths": lengths, "model": model}


def with_many_micro_steps(request: Request) -> Request | None:
    """Return the request with the least micro-steps of which more change nothing; None if it has as
    many, or if optimizer steps reuse a generation.
    """
    point = point_of(request)
    if point.micro_steps >= MICRO_STEP_CLASSES or stale_generation(request) is not None:
        return None
    many = point._replace(micro_steps=MICRO_STEP_CLASSES)
    return request_at(request, many, request["model"].get("layers"))


def stale_generation(request: Request) -> tuple[int | None, int] | None:
    """Return the micro-steps of an optimizer step and of a generation, if they differ: steps then
    reuse a generation. Else None.
    """
    settings = request["settings"]
    accumulation = settings.get("gradient_accumulation_steps")
    steps = settings.get("steps_per_generation")
    return None if steps in (None, accumulation) else (accumulation, steps)


def _group_size(requested: int, batch: int) -> int:
    """Return the requested group size if it divides the batch, else the smallest divisor."""
    if batch % requested:
        for size in range(2, batch + 1):
            if batch % size == 0:
                return size
    return requested
