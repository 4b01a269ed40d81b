"""Images of a request's rows: those of --image-size, else the largest of the user's dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autotune.core.dataset import ImageRows, Images
from autotune.core.errors import BadInput
from autotune.core.job import Hardware, Model, Task, Workload
from autotune.core.units import counted
from autotune.estimate import vision_images
from autotune.frameworks.base import Trainer
from autotune.request.values import LengthChoice


def with_images(
    choice: LengthChoice,
    workload: Workload,
    hardware: Hardware,
    trainer: Trainer,
) -> tuple[Workload, list[str]]:
    """Return the workload with the images of its rows, and notes on them."""
    model = workload.model
    images = _stated_images(choice, workload, trainer)
    rows = None
    has_vision = isinstance(model.config.get("vision_config"), Mapping)
    if images is None and has_vision and trainer.reads_images:
        try:
            rows = trainer.image_rows(Task(workload=workload, hardware=hardware))
        except BadInput as error:
            note = (
                f"images of the dataset are not counted: {error.what} Give --image-size and"
                " --images-per-sample"
            )
            return workload, [note]
        images = None if rows is None else _largest(rows.sizes, model)

    if images is not None:
        note = f"{images}{_found_in(rows)}: counted in the lengths of prompts and rows"
        return replace(workload, images=images), [note]
    if not has_vision:
        return workload, []
    hint = f"{trainer.name} is modelled without images"
    if trainer.reads_images:
        hint = "--image-size counts images as well"
    return workload, [f"rows of {model.name} are counted as text only; {hint}"]


def _stated_images(
    choice: LengthChoice,
    workload: Workload,
    trainer: Trainer,
) -> Images | None:
    if choice.image_size is None:
        return None
    if not trainer.reads_images:
        raise BadInput(
            f"--image-size: rows of {workload.method} with {trainer.name} have no images here.",
            way_out="Leave it out, or use --framework trl with --method sft, grpo or rloo.",
        )
    width, height = choice.image_size
    return vision_images.images_of(
        workload.model.config,
        workload.model.folder,
        count=choice.images_per_row or 1,
        width=width,
        height=height,
    )


def _found_in(rows: ImageRows | None) -> str:
    if rows is None:
        return ""
    total = "the first rows" if rows.rows is None else counted(rows.rows, "row")
    return f" (the largest among {rows.looked_at:,} of {total} of the dataset)"


def _largest(rows: Iterable[tuple[tuple[int, int], ...]], model: Model) -> Images | None:
    """Return the row with the most image tokens, every image as large as its largest; None: no
    row has images.
    """
    candidates: list[Images] = []
    for sizes in set(rows):
        if sizes:
            candidates.append(_largest_of_row(sizes, model))
    return max(candidates, key=lambda images: images.row_tokens, default=None)


def _largest_of_row(sizes: tuple[tuple[int, int], ...], model: Model) -> Images:
    candidates = []
    for width, height in set(sizes):
        images = vision_images.images_of(
            model.config,
            model.folder,
            count=len(sizes),
            width=width,
            height=height,
        )
        candidates.append(images)

    def size(images: Images) -> tuple[int, int]:
        return images.tokens, images.width * images.height

    return max(candidates, key=size)
