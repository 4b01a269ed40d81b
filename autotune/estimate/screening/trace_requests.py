"""Trace requests as points of a family: family keys, and requests at other points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.space import fingerprint
from autotune.estimate.screening.blocks import Point
from autotune.estimate.screening.survey import micro_step_class

Request = Mapping[str, Any]

POINT_SETTINGS = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "max_completion_length", "max_length",
    "num_generations",
})  # fmt: skip
"""Settings that vary inside a family (the group size changes a few numbers per prompt)."""

WHOLE_WEIGHTS = ("zero1", "zero2")  # stages of ZeRO that leave the modules unchanged; under the third they save other tensors


def family_key(request: Request) -> str:
    """Return a fingerprint of everything but the point, with the class of its micro-steps."""
    settings = request["settings"]
    accumulation, steps = settings.get("gradient_accumulation_steps"), settings.get("steps_per_generation")
    stale = None if steps in (None, accumulation) else (accumulation, steps)
    fixed = {name: value for name, value in settings.items() if name not in POINT_SETTINGS}
    rest = {name: value for name, value in request.items() if name not in ("settings", "lengths")}
    return fingerprint({**rest, "settings": fixed, "course": micro_step_class(point_of(request).micro_steps), "stale": stale})


def traced_request(request: Request) -> Request:
    """Return the request to trace: ZeRO's buckets, shards and offloading are added afterwards."""
    sharding = request["sharding"]
    if sharding["kind"] not in (*WHOLE_WEIGHTS, "zero3"):
        return request
    kind = WHOLE_WEIGHTS[-1] if sharding["kind"] in WHOLE_WEIGHTS else "zero3"
    return {**request, "sharding": {"kind": kind, "ranks": sharding["ranks"]}}


def point_of(request: Request) -> Point:
    settings, lengths = request["settings"], request["lengths"]
    return Point(
        micro_batch=settings["per_device_train_batch_size"],
        prompt=lengths["prompt"],
        completion=lengths["completion"],
        micro_steps=settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps") or 1,
    )


def at(request: Request, point: Point, layers: int | None) -> Request:
    """Return the request at another point."""
    settings = dict(request["settings"])
    before = settings.get("steps_per_generation")
    settings["per_device_train_batch_size"] = point.micro_batch
    if before in (None, settings.get("gradient_accumulation_steps")):
        settings["gradient_accumulation_steps"] = point.micro_steps
    if before is not None:
        settings["steps_per_generation"] = point.micro_steps
    if "max_completion_length" in settings:
        settings["max_completion_length"] = point.completion
    if "max_length" in settings:
        settings["max_length"] = point.prompt + point.completion
    if "num_generations" in settings:
        # The requested group size if it divides the generation batch, else the smallest divisor.
        batch, wanted = point.micro_batch * point.micro_steps * request["sharding"]["ranks"], settings["num_generations"]
        sizes = (wanted, *range(2, batch + 1))
        settings["num_generations"] = next((size for size in sizes if batch % size == 0), wanted)
    lengths = {**request["lengths"], "prompt": point.prompt, "completion": point.completion}
    return {**request, "settings": settings, "lengths": lengths, "model": {**request["model"], "layers": layers}}
