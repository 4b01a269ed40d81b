"""What is asked of the tracing side, as points of a family: which requests differ in nothing else, and the same one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.candidate import fingerprint
from autotune.predict.pieces.points import Point
from autotune.predict.pieces.survey import course_of

Request = Mapping[str, Any]

POINT_SETTINGS = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "max_completion_length", "max_length",
    "num_generations",
})  # fmt: skip
"""What moves inside a family. A group's size moves nothing but a few numbers per prompt."""


WHOLE_WEIGHTS = ("zero1", "zero2")
"""Stages of ZeRO that leave the modules as they are; the third keeps other tensors of them."""


def family_key(request: Request) -> str:
    """Everything but the point, and the course that the number of micro-steps leads to."""
    settings = request["settings"]
    accumulation, steps = settings.get("gradient_accumulation_steps"), settings.get("steps_per_generation")
    stale = None if steps in (None, accumulation) else (accumulation, steps)
    fixed = {name: value for name, value in settings.items() if name not in POINT_SETTINGS}
    rest = {name: value for name, value in request.items() if name not in ("settings", "lengths")}
    return fingerprint({**rest, "settings": fixed, "course": course_of(point_of(request).micro_steps), "stale": stale})


def followed(request: Request) -> Request:
    """What the tracing side is asked: what ZeRO's stages do with buckets, parts and the host is put into the trace afterwards."""
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
    """The same request at another point."""
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
        settings["num_generations"] = _group(point, request["sharding"]["ranks"], settings["num_generations"])
    lengths = {**request["lengths"], "prompt": point.prompt, "completion": point.completion}
    return {**request, "settings": settings, "lengths": lengths, "model": {**request["model"], "layers": layers}}


def _group(point: Point, ranks: int, wanted: int) -> int:
    """Completions per prompt that this generation batch can be cut into: as wanted, or the next best."""
    batch = point.micro_batch * point.micro_steps * ranks
    return next((size for size in (wanted, *range(2, batch + 1)) if batch % size == 0), wanted)
