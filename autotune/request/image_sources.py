"""Images of the rows: from --image-size and --images-per-sample, or from the user's dataset."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autotune.core.dataset import Images
from autotune.core.errors import BadInput
from autotune.core.job import Hardware, Model, Task, Workload
from autotune.estimate import vision
from autotune.frameworks.base import Trainer
from autotune.request.assignments import positive
from autotune.request.flags import Flags


def with_images(flags: Flags, workload: Workload, hardware: Hardware, trainer: Trainer) -> tuple[Workload, list[str]]:
    """Return the workload with the images of its rows, and notes on them."""
    images, found = _by_flag(flags, workload.model, trainer), None
    sees = isinstance(workload.model.config.get("vision_config"), Mapping)
    if images is None and trainer.reads_images and sees:
        try:
            found = trainer.image_rows(Task(workload=workload, hardware=hardware))
            images = None if found is None else _largest(found.sizes, workload.model)
        except BadInput as error:
            return workload, [f"images of the dataset are not counted: {error.what} Give --image-size and --images-per-sample"]
    if images is None:
        how = "--image-size counts images" if trainer.reads_images else f"images are not counted with {trainer.name}"
        return workload, [f"rows are texts alone for {workload.model.name}; {how}"] if sees else []
    origin = ""
    if found is not None:
        of = "the first rows" if found.rows is None else f"{found.rows:,} rows"
        origin = f" (the largest among {found.looked_at:,} of {of} of the dataset)"
    return replace(workload, images=images), [f"{images}{origin}: counted in the lengths of prompts and rows"]


def _by_flag(flags: Flags, model: Model, trainer: Trainer) -> Images | None:
    if flags.image_size is None:
        if flags.images_per_sample is not None:
            raise BadInput("--images-per-sample needs the images' size.", way_out="Add --image-size 448x448.")
        return None
    size = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", flags.image_size)
    if size is None:
        raise BadInput(f"--image-size {flags.image_size}: not a width and a height.", way_out="Write it like 448x448.")
    if not trainer.reads_images:
        raise BadInput(
            f"--image-size: rows of {flags.method} with {trainer.name} have no images here.",
            way_out="Leave it out, or use --framework trl with --method sft, grpo or rloo.",
        )
    count = positive("--images-per-sample", flags.images_per_sample) or 1
    return vision.images_of(model.config, model.folder, count=count, width=int(size[1]), height=int(size[2]))


def _largest(rows: Iterable[tuple[tuple[int, int], ...]], model: Model) -> Images | None:
    """Return the row with the most image tokens, every image as large as its largest; None: no row has images."""
    found: list[Images] = []
    for row in filter(None, set(rows)):
        each = [vision.images_of(model.config, model.folder, count=len(row), width=w, height=h) for w, h in set(row)]
        found.append(max(each, key=lambda images: (images.tokens, images.width * images.height)))
    return max(found, key=lambda images: images.row_tokens, default=None)
