"""Measurements of a dataset as TRL's trainers read it: tokens of prompts, tokens of whole rows,
sizes of images.

The training interpreter runs it (`python .../autotune/worker prompts`, `rows` or `images`), with
one JSON object on stdin and one on stdout. All requests have

    "dataset": {"dataset_name": ..., "dataset_config": ..., "dataset_train_split": ...,
                "datasets": [...], ...}

and those that tokenise

    "model": "folder or hub id", "trust_remote_code": false, "model_revision": "main" | null,
    "chat_template_kwargs": {...} | null

`prompts` tokenises as GRPOTrainer does, and writes the rows within a limit: TRL has no limit on
prompts; a filtered dataset, loaded by `dataset_name: <out>`, provides one. Its additional fields,
and its answer:

    {"limit": P | null, "out": "folder" | null}
    {"rows": n, "kept": n, "dropped": n, "longest_prompt": n, "longest_kept": n,
     "percentiles": {"50": n, ...}, "splits": {"train": {"rows": n, "kept": n}},
     "dataset_name": "out" | null}

`rows` measures for supervised fine-tuning, with template and end token. With a percentile's length
as the limit, `longer` rows exceed it. Truncating them removes `cut` tokens, leaving them out
`left_out` tokens.

    {"rows": n, "looked_at": n, "tokens": n,
     "percentiles": [{"share": 90, "length": n, "longer": n, "cut": n, "left_out": n}]}

`images` reads width and height of every image of a row, from its header alone. Of a dataset of the
hub, the first rows are read and nothing else is fetched.

    {"rows": n | null, "looked_at": n, "sizes": [[[width, height], ...], ...]}

For `rows` and `images` a large dataset is sampled at a regular stride, and the counts are of the
sample.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from .protocol import Request, Settings

MEASURED_PERCENTILES = (50, 90, 95, 99, 100)
BATCH = 256

SizesAnswer = dict[str, Any]


# Splits, tokenizers and percentiles.


def load_splits(dataset: Request) -> dict[str, Any]:
    """Load the splits that TRL's script trains and evaluates on, by the same functions."""
    if dataset.get("datasets"):
        from trl import get_dataset
        from trl.scripts.utils import DatasetMixtureConfig

        parts = [dict(part) for part in dataset["datasets"]]
        test_split_size = dataset.get("test_split_size")
        mixture = DatasetMixtureConfig(datasets=parts, test_split_size=test_split_size)
        return dict(get_dataset(mixture))
    from datasets import load_dataset

    config_name = dataset.get("dataset_config")
    loaded = load_dataset(dataset["dataset_name"], name=config_name)
    train_name = train_split_of(dataset)
    if train_name not in loaded:
        raise ValueError(f"the dataset has no split {train_name!r}; it has {sorted(loaded)}")
    splits = {train_name: loaded[train_name]}
    test_name = dataset.get("dataset_test_split") or "test"
    if test_name in loaded:
        splits[test_name] = loaded[test_name]
    return splits


def train_split_of(dataset: Request) -> str:
    return str(dataset.get("dataset_train_split") or "train")


def load_tokenizer(request: Request) -> Any:
    """Load GRPOTrainer's tokenizer: the model's processor, if it has one."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        request["model"],
        revision=request.get("model_revision"),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )


def percentile(ordered: Sequence[int], share: int) -> int:
    """Smallest length that at least `share` per cent do not exceed."""
    rank = math.ceil(share / 100 * len(ordered))
    return ordered[max(0, rank - 1)]


# `prompts`.


def prompt_figures(request: Request) -> SizesAnswer:
    splits = load_splits(request["dataset"])
    tokenizer = load_tokenizer(request)
    limit = request.get("limit")
    folder = request.get("out")
    options = request.get("chat_template_kwargs") or {}
    figures: SizesAnswer = {"splits": {}}
    for index, (name, split) in enumerate(splits.items()):
        lengths = lengths_of(split, tokenizer, options)
        kept_rows = []
        for row, length in enumerate(lengths):
            if limit is None or length <= limit:
                kept_rows.append(row)
        figures["splits"][name] = {"rows": len(lengths), "kept": len(kept_rows)}
        if index == 0:  # the training split
            figures.update(_split_figures(lengths, kept_rows))
            if not kept_rows:
                raise ValueError(
                    f"no prompt is within {limit} tokens; the shortest has {min(lengths)}"
                )
        if folder and kept_rows:
            kept_split = split.select(kept_rows)
            _write_split(kept_split, Path(folder), name)
    figures["dataset_name"] = str(folder) if folder else None
    return figures


def lengths_of(
    split: Any,
    tokenizer: Any,
    options: Settings,
) -> list[int]:
    if "prompt" not in split.column_names:
        raise ValueError(f"the dataset has no column 'prompt'; it has {sorted(split.column_names)}")
    if not len(split):
        raise ValueError("the dataset has no rows")
    lengths: list[int] = []
    for start in range(0, len(split), BATCH):
        batch = split[start : start + BATCH]
        lengths += prompt_lengths(tokenizer, batch["prompt"], options)
    return lengths


def prompt_lengths(
    tokenizer: Any,
    prompts: Sequence[Any],
    options: Settings,
) -> list[int]:
    """Tokens of each prompt, as in GRPOTrainer._tokenize_prompts."""
    if isinstance(prompts[0], str):
        encoded = tokenizer(text=list(prompts))
    else:
        encoded = tokenizer.apply_chat_template(
            conversation=list(prompts),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **options,
        )
    return [len(ids) for ids in encoded["input_ids"]]


def _split_figures(lengths: Sequence[int], kept_rows: Sequence[int]) -> SizesAnswer:
    ordered = sorted(lengths)
    kept_lengths = [lengths[row] for row in kept_rows]
    return {
        "rows": len(lengths),
        "kept": len(kept_rows),
        "dropped": len(lengths) - len(kept_rows),
        "longest_prompt": ordered[-1],
        "longest_kept": max(kept_lengths, default=None),
        "percentiles": {str(share): percentile(ordered, share) for share in MEASURED_PERCENTILES},
    }


def _write_split(
    split: Any,
    folder: Path,
    name: str,
) -> None:
    """Write rows atomically, under the name by which `load_dataset` finds the split."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    partial = data / ".partial"
    split.to_parquet(str(partial))
    partial.replace(data / f"{name}-00000-of-00001.parquet")


# `rows`.

ROW_PERCENTILES = (50, 75, 90, 95, 99, 100)
MAX_MEASURED_ROWS = 20_000
FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
PAIRS = (("prompt", "completion"), ("query", "response"), ("instruction", "output"))


def row_figures(request: Request) -> SizesAnswer:
    from transformers import AutoTokenizer

    rows = load_rows(request["dataset"])
    if not len(rows):
        raise ValueError("the dataset has no rows")
    tokenizer = AutoTokenizer.from_pretrained(
        request["model"],
        revision=request.get("model_revision"),
        trust_remote_code=bool(request.get("trust_remote_code")),
    )
    stride = math.ceil(len(rows) / MAX_MEASURED_ROWS)
    sample = rows
    if stride > 1:
        looked_at = range(0, len(rows), stride)
        sample = rows.select(looked_at)
    options = request.get("chat_template_kwargs") or {}
    lengths: list[int] = []
    for texts in texts_of(sample, tokenizer, options):
        encoded = tokenizer(texts, add_special_tokens=False)
        lengths += [len(ids) for ids in encoded["input_ids"]]
    ordered = sorted(lengths)
    return {
        "rows": len(rows),
        "looked_at": len(ordered),
        "tokens": sum(ordered),
        "percentiles": [at_percentile(ordered, share) for share in ROW_PERCENTILES],
    }


def load_rows(dataset: Request) -> Any:
    """Load the training split of a file, a folder or a dataset of the hub."""
    from datasets import load_dataset

    if dataset.get("datasets"):
        return load_splits(dataset)["train"]
    name = str(dataset["dataset_name"])
    if Path(name).is_file():
        kind = FILE_KINDS.get(Path(name).suffix, "json")
        return load_dataset(kind, data_files=name, split="train")
    config_name = dataset.get("dataset_config")
    return load_dataset(name, name=config_name, split=train_split_of(dataset))


def texts_of(
    rows: Any,
    tokenizer: Any,
    options: Settings,
) -> Iterator[list[str]]:
    """Yield batches of rows as the text to tokenise."""
    text_of = _text_function(set(rows.column_names), tokenizer, options)
    for start in range(0, len(rows), BATCH):
        stop = min(start + BATCH, len(rows))
        batch = rows[start:stop]
        texts = []
        for index in range(stop - start):
            row = {name: values[index] for name, values in batch.items()}
            texts.append(text_of(row))
        yield texts


def _text_function(
    columns: set[str],
    tokenizer: Any,
    options: Settings,
) -> Callable[[Mapping[str, Any]], str]:
    """Return the function from a row with these columns to its text."""

    def templated(messages: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def with_end(text: Any) -> str:
        """Append the end token, as trainers do, unless it is there."""
        end = tokenizer.eos_token or ""
        return str(text) if str(text).endswith(end) else f"{text}{end}"

    if "messages" in columns:
        return lambda row: templated(row["messages"])
    if "text" in columns:
        return lambda row: with_end(row["text"])
    pair = next((pair for pair in PAIRS if columns.issuperset(pair)), None)
    if pair is None:
        raise ValueError(
            "rows have none of the columns messages, text, prompt and completion; they have"
            f" {sorted(columns)}"
        )
    prompt_name, answer_name = pair

    def joined(row: Mapping[str, Any]) -> str:
        prompt = row[prompt_name]
        answer = row[answer_name]
        if isinstance(prompt, list):
            return templated([*prompt, *answer])
        return with_end(f"{prompt}{answer}")

    return joined


def at_percentile(ordered: Sequence[int], share: int) -> dict[str, int]:
    """Return the length that `share` per cent of the rows do not exceed, and its effect."""
    length = percentile(ordered, share)
    longer = [row_length for row_length in ordered if row_length > length]
    total = sum(longer)
    return {
        "share": share,
        "length": length,
        "longer": len(longer),
        "cut": total - length * len(longer),
        "left_out": total,
    }


# `images`.

COLUMNS = ("images", "image")  # columns that TRL's trainers read
MAX_IMAGE_ROWS = 2_000
MAX_FETCHED_ROWS = 200
MAX_IMAGES = 256  # of one row


def image_sizes(request: Request) -> SizesAnswer:
    # 1. The training split, and its length; None for one that is read from the hub row by row.
    rows, is_stream = _image_source(request["dataset"])
    count = None if is_stream else len(rows)
    # 2. The sizes of a sample
    column = image_column(rows)
    if column is None or count == 0:
        return {"rows": count, "looked_at": 0, "sizes": []}
    sample = undecoded(rows.select_columns([column]), column)
    if count is None:
        sample = sample.take(MAX_FETCHED_ROWS)
    else:
        stride = math.ceil(count / MAX_IMAGE_ROWS)
        sample = sample.select(range(0, count, stride))
    sizes = []
    for row in sample:
        images = listed(row[column])[:MAX_IMAGES]
        sizes.append([size_of(image) for image in images])
    return {"rows": count, "looked_at": len(sizes), "sizes": sizes}


def _image_source(dataset: Request) -> tuple[Any, bool]:
    """Return the training split, and True if it is a stream.

    A stream saves fetching a whole dataset from the hub.
    """
    from datasets import load_dataset

    name = str(dataset.get("dataset_name") or "")
    split = train_split_of(dataset)
    is_on_hub = bool(name) and not Path(name).exists()
    if is_on_hub and os.environ.get("HF_HUB_OFFLINE") != "1":
        config = dataset.get("dataset_config")
        return load_dataset(
            name,
            name=config,
            split=split,
            streaming=True,
        ), True
    if Path(name).is_file():
        return load_rows(dataset), False
    return load_splits(dataset)[split], False


def image_column(rows: Any) -> str | None:
    names = rows.column_names or ()
    return next((name for name in COLUMNS if name in names), None)


def undecoded(rows: Any, column: str) -> Any:
    """Return the rows with images as bytes or paths: decoding would read every pixel."""
    from datasets import Image

    feature = rows.features[column]
    plain = Image(decode=False)
    if isinstance(feature, Image):
        return rows.cast_column(column, plain)
    if isinstance(feature, list) and isinstance(feature[0], Image):
        return rows.cast_column(column, [plain])
    if isinstance(getattr(feature, "feature", None), Image):
        return rows.cast_column(column, type(feature)(plain))
    return rows


def listed(value: Any) -> list[Any]:
    """Return a value as a list: a list stays one, and None is an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def size_of(image: Any) -> list[int]:
    """Return width and height of an image given as bytes, as a path, or decoded."""
    from PIL import Image

    if isinstance(image, dict):
        image = BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
    if isinstance(image, str | BytesIO):
        with Image.open(image) as opened:
            return list(opened.size)
    return list(image.size)


# The program.

SIZE_PROGRAMS: Mapping[str, Callable[[Request], SizesAnswer]] = {
    "prompts": prompt_figures,
    "rows": row_figures,
    "images": image_sizes,
}


def main() -> None:
    """SizesAnswer the request on stdin. Frameworks print to stdout, which is diverted to stderr."""
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        answer = SIZE_PROGRAMS[sys.argv[1]]
        request = json.load(sys.stdin)
        json.dump(answer(request), real)
