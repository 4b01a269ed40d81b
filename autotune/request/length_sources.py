"""Completion lengths from what `--lengths` names: a distribution, numbers, a training log, a W&B
export, TRL's tables of completions, or the output folder of a run or of an earlier study.

A log states mean and longest length of each step, not the lengths themselves. They are taken as
lognormal, with the longest as their 99 % quantile, and the share that was cut off at the longest.

Images of the rows are from `--image-size` and `--images-per-sample`, or from the user's dataset.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

from autotune.core.dataset import Images, TokenLengths
from autotune.core.errors import BadInput
from autotune.core.files import read_text
from autotune.core.job import Hardware, Model, Task, Workload
from autotune.estimate import vision
from autotune.frameworks.base import Trainer
from autotune.request.assignments import positive
from autotune.request.flags import Flags

LARGEST_BYTES = 256 << 20
MEAN, LONGEST, CLIPPED = "mean", "longest", "clipped"
NAMES: Mapping[str, tuple[str, ...]] = {
    MEAN: ("completions/mean_length", "response_length/mean", "completion_length", "mean_length"),
    LONGEST: ("completions/max_length", "response_length/max", "max_length"),
    CLIPPED: (
        "completions/clipped_ratio",
        "response_length/clip_ratio",
        "clipped_ratio",
        "clip_ratio",
    ),
}
"""Names of TRL and swift, verl, and older releases of TRL."""

LONGEST_QUANTILE, DEFAULT_SIGMA = 0.99, 0.6
MAX_STEPS, SAMPLES_PER_STEP = 256, 64
CHARACTERS_PER_TOKEN = 4

LOGNORMAL, GROWING = "lognormal:", "growing:"
STAGES = 4  # parts of a training whose lengths change
WAY_OUT = (
    "Give --lengths a training log with mean completion lengths, a W&B export of them, a file with"
    " one number a line, a training's output folder, or lognormal:MEAN,P95."
)

PROMPTS = "--prompt-lengths"
PROMPTS_WAY_OUT = f"Give a file with one number a line, or {PROMPTS} lognormal:MEAN,P95."


def read(source: str) -> TokenLengths:
    """Return the lengths that the source states."""
    if source.startswith(GROWING):
        return _changing(source, source.removeprefix(GROWING))
    if source.startswith(LOGNORMAL):
        return _lognormal(source, source.removeprefix(LOGNORMAL))
    path = Path(source)
    if path.is_dir():
        return _of_folder(source, path)
    text = read_text(path, largest_bytes=LARGEST_BYTES, way_out=WAY_OUT)
    lengths = _numbers(text) or _of_steps(_steps_in(text))
    if not lengths:
        raise BadInput(f"--lengths {source}: no completion lengths in it.", way_out=WAY_OUT)
    return TokenLengths.of(source, lengths)


def read_prompts(source: str) -> TokenLengths:
    """Return the prompt lengths that the source states: a distribution, or one number a line."""
    if source.startswith(LOGNORMAL):
        return _lognormal(source, source.removeprefix(LOGNORMAL), PROMPTS)
    lengths = _numbers(
        read_text(Path(source), largest_bytes=LARGEST_BYTES, way_out=PROMPTS_WAY_OUT)
    )
    if not lengths:
        raise BadInput(f"{PROMPTS} {source}: not one number a line.", way_out=PROMPTS_WAY_OUT)
    return TokenLengths.of(source, lengths)


def _changing(source: str, given: str) -> TokenLengths:
    """Return lengths that change over training: the parts of a log, or steps between two
    distributions.
    """
    if given.startswith(LOGNORMAL):
        return _between(source, given.removeprefix(LOGNORMAL))
    path = Path(given)
    steps = (
        _of_trainer(path)
        if path.is_dir()
        else _steps_in(read_text(path, largest_bytes=LARGEST_BYTES, way_out=WAY_OUT))
    )
    if len(steps) < STAGES:
        raise BadInput(
            f"--lengths {source}: {len(steps)} steps with completion lengths, and changing ones"
            f" need {STAGES}.",
            way_out=(
                "Give a training log or its output folder, or"
                f" {GROWING}{LOGNORMAL}MEAN,P95,MEAN,P95 (first and last step)."
            ),
        )
    cuts = [len(steps) * stage // STAGES for stage in range(STAGES + 1)]
    return TokenLengths.changing(
        source, (TokenLengths.of(source, _of_steps(steps[a:b])) for a, b in pairwise(cuts))
    )


def _between(source: str, figures: str) -> TokenLengths:
    """Return the stages between two distributions, in equal ratios."""
    first, last = figures.split(",")[:2], figures.split(",")[2:]
    for pair in (first, last):
        _lognormal(source, ",".join(pair))
    (mean, p95), (last_mean, last_p95) = ([float(part) for part in pair] for pair in (first, last))
    shares = [(stage + 0.5) / STAGES for stage in range(STAGES)]
    stages = (
        TokenLengths.lognormal(
            source, mean * (last_mean / mean) ** share, p95 * (last_p95 / p95) ** share
        )
        for share in shares
    )
    return TokenLengths.changing(source, stages)


def _of_folder(source: str, path: Path) -> TokenLengths:
    """Return the lengths of a training's output folder, of TRL's tables, or those that a study
    was given.
    """
    if steps := _of_trainer(path):
        return TokenLengths.of(source, _of_steps(steps))
    record = path / "recommendation.json"
    if record.is_file() and not list(path.glob("**/completions_*.parquet")):
        given = _json(record).get("question", {}).get("completion_lengths")
        if not given:
            raise BadInput(
                f"--lengths {source}: that study knew no completion lengths, and no training has"
                " run in its folder.",
                way_out=WAY_OUT,
            )
        return TokenLengths.lognormal(source, given["mean"], max(given["p95"], given["mean"]))
    # TRL's tables: by their characters, as they have no tokens.
    files = sorted(
        [*path.glob("completions_*.parquet"), *path.glob("completions/completions_*.parquet")]
    )
    if not files:
        raise BadInput(f"--lengths {path}: no completions_*.parquet in it.", way_out=WAY_OUT)
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(
            f"--lengths {path}: reading tables needs pyarrow.", way_out="pip install pyarrow"
        ) from error
    found: list[float] = []
    for file in files:
        try:
            texts = (
                parquet.read_table(file, columns=["completion"]).column("completion").to_pylist()
            )
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(
                f"--lengths {file}: no column `completion` can be read.", way_out=WAY_OUT
            ) from error
        found += [len(_text(text)) / CHARACTERS_PER_TOKEN for text in texts]
    return TokenLengths.of(source, found)


def _of_trainer(folder: Path) -> list[Step]:
    """Return the logged steps of transformers' trainer: those of the latest
    `trainer_state.json`.
    """
    states = [_json(path) for path in folder.glob("**/trainer_state.json")]
    latest = max(
        (state for state in states if isinstance(state.get("log_history"), list)),
        key=lambda state: len(state["log_history"]),
        default=None,
    )
    return (
        []
        if latest is None
        else _logged("\n".join(json.dumps(row) for row in latest["log_history"]))
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path, largest_bytes=LARGEST_BYTES, way_out=WAY_OUT))
    except ValueError as error:
        raise BadInput(f"--lengths {path}: not JSON.", way_out=WAY_OUT) from error
    return found if isinstance(found, dict) else {}


def _steps_in(text: str) -> list[Step]:
    return _columns(text) or _logged(text)


def description(lengths: TokenLengths) -> str:
    """Return a note for the reader."""
    if lengths.stages:
        means = ", ".join(f"{part.mean:,.0f}" for part in lengths.stages)
        return (
            f"completion lengths from {lengths.source}: means {means} over training; memory is that"
            " of the longest"
        )
    return (
        f"completion lengths from {lengths.source}: mean {lengths.mean:,.0f}, median"
        f" {lengths.quantile(0.5):,}, 95 % up to {lengths.quantile(0.95):,} tokens; memory is that"
        " of the longest"
    )


def _lognormal(source: str, figures: str, flag: str = "--lengths") -> TokenLengths:
    try:
        mean, p95 = (float(part) for part in figures.split(","))
        if not (0 < mean < math.inf and 0 < p95 < math.inf):
            raise ValueError("mean and 95 % quantile must be above zero")
        return TokenLengths.lognormal(source, mean, p95)
    except ValueError as error:
        raise BadInput(
            f"{flag} {source}: {error}.",
            way_out=f"Give mean and 95 % quantile in tokens. Example: {flag} lognormal:600,1500.",
        ) from error


def _numbers(text: str) -> list[float]:
    """Return one number a line; empty if any line is something else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = [float(line) for line in lines]
    except ValueError:
        return []
    return [length for length in found if 0 <= length < math.inf]


Step = Mapping[
    str, float
]  # mean, longest and clipped share of one training step, as far as they are stated


def _columns(text: str) -> list[Step]:
    """Return the steps of a CSV whose header names a mean length, as W&B exports it."""
    head = text.splitlines()[:1]
    if not head or "," not in head[0]:
        return []
    rows = csv.DictReader(io.StringIO(text))
    columns: dict[str, str] = {}
    for column in rows.fieldnames or ():
        bare = column.removesuffix("__MIN") == column and column.removesuffix("__MAX") == column
        quantity = _quantity(column.rpartition(" - ")[2]) if bare else None
        if quantity is not None:
            columns.setdefault(quantity, column)
    if MEAN not in columns:
        return []
    steps = (
        {quantity: _number(row.get(column)) for quantity, column in columns.items()} for row in rows
    )
    return [
        known
        for step in steps
        if MEAN in (known := {name: value for name, value in step.items() if value is not None})
    ]


def _quantity(name: str) -> str | None:
    bare = name.strip().strip("\"'").removeprefix("train/")
    return next((quantity for quantity, names in NAMES.items() if bare in names), None)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


FIGURE = re.compile(
    r"(?<![\w/])(?:train/)?(?P<name>"
    + "|".join(re.escape(name) for names in NAMES.values() for name in names)
    + r")['\"]?\s*[:=]\s*(?:np\.float\d+\()?['\"]?(?P<value>\d[\d.]*(?:[eE][+-]?\d+)?)"
)


def _logged(text: str) -> list[Step]:
    """Return the steps of a printed log: one line each."""
    steps: list[Step] = []
    for line in text.splitlines():
        step: dict[str, float] = {}
        for found in FIGURE.finditer(line):
            quantity, value = _quantity(found["name"]), _number(found["value"])
            if quantity is not None and value is not None:
                step.setdefault(quantity, value)
        if step.get(MEAN):
            steps.append(step)
    return steps


def _of_steps(steps: Sequence[Step]) -> list[float]:
    """Return the lengths of a limited number of steps, over the whole run."""
    every = max(1, math.ceil(len(steps) / MAX_STEPS))
    return [length for step in steps[::every] for length in _of_step(step)]


def _of_step(step: Step) -> list[float]:
    """Return quantiles of a step's lengths: those that ended by themselves, then those cut off."""
    mean, longest, clipped = step[MEAN], step.get(LONGEST), min(1.0, step.get(CLIPPED, 0.0))
    cut = round(clipped * SAMPLES_PER_STEP) if longest else 0
    ended = SAMPLES_PER_STEP - cut
    if not ended or not mean:
        return [longest or mean] * SAMPLES_PER_STEP
    own = max(1.0, (mean * SAMPLES_PER_STEP - cut * (longest or 0)) / ended)
    sigma = _sigma(own, longest)
    quantiles = (NormalDist().inv_cdf((place + 0.5) / ended) for place in range(ended))
    lengths = [
        min(longest or math.inf, own * math.exp(sigma * z - sigma * sigma / 2)) for z in quantiles
    ]
    return lengths + [longest or own] * cut


def _sigma(mean: float, longest: float | None) -> float:
    """Return s of ln(longest / mean) = z·s - s²/2, z: quantile of the longest."""
    if longest is None or longest <= mean:
        return DEFAULT_SIGMA if longest is None else 0.0
    z, ratio = NormalDist().inv_cdf(LONGEST_QUANTILE), math.log(longest / mean)
    return z - math.sqrt(max(0.0, z * z - 2 * ratio))


def _text(completion: object) -> str:
    """Return the text of a completion: a string, or messages."""
    if isinstance(completion, list):
        return "".join(
            str(message.get("content") or "") for message in completion if isinstance(message, dict)
        )
    return str(completion or "")


def with_images(
    flags: Flags, workload: Workload, hardware: Hardware, trainer: Trainer
) -> tuple[Workload, list[str]]:
    """Return the workload with the images of its rows, and notes on them."""
    images, found = _by_flag(flags, workload.model, trainer), None
    sees = isinstance(workload.model.config.get("vision_config"), Mapping)
    if images is None and trainer.reads_images and sees:
        try:
            found = trainer.image_rows(Task(workload=workload, hardware=hardware))
            images = None if found is None else _largest(found.sizes, workload.model)
        except BadInput as error:
            return workload, [
                (
                    f"images of the dataset are not counted: {error.what} Give --image-size and"
                    " --images-per-sample"
                )
            ]
    if images is None:
        how = (
            "--image-size counts images"
            if trainer.reads_images
            else f"images are not counted with {trainer.name}"
        )
        return workload, [f"rows are texts alone for {workload.model.name}; {how}"] if sees else []
    origin = ""
    if found is not None:
        of = "the first rows" if found.rows is None else f"{found.rows:,} rows"
        origin = f" (the largest among {found.looked_at:,} of {of} of the dataset)"
    return replace(workload, images=images), [
        f"{images}{origin}: counted in the lengths of prompts and rows"
    ]


def _by_flag(flags: Flags, model: Model, trainer: Trainer) -> Images | None:
    if flags.image_size is None:
        if flags.images_per_sample is not None:
            raise BadInput(
                "--images-per-sample needs the images' size.", way_out="Add --image-size 448x448."
            )
        return None
    size = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", flags.image_size)
    if size is None:
        raise BadInput(
            f"--image-size {flags.image_size}: not a width and a height.",
            way_out="Write it like 448x448.",
        )
    if not trainer.reads_images:
        raise BadInput(
            f"--image-size: rows of {flags.method} with {trainer.name} have no images here.",
            way_out="Leave it out, or use --framework trl with --method sft, grpo or rloo.",
        )
    count = positive("--images-per-sample", flags.images_per_sample) or 1
    return vision.images_of(
        model.config, model.folder, count=count, width=int(size[1]), height=int(size[2])
    )


def _largest(rows: Iterable[tuple[tuple[int, int], ...]], model: Model) -> Images | None:
    """Return the row with the most image tokens, every image as large as its largest; None: no
    row has images.
    """
    found: list[Images] = []
    for row in filter(None, set(rows)):
        each = [
            vision.images_of(model.config, model.folder, count=len(row), width=w, height=h)
            for w, h in set(row)
        ]
        found.append(max(each, key=lambda images: (images.tokens, images.width * images.height)))
    return max(found, key=lambda images: images.row_tokens, default=None)
