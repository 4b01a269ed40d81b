"""Measurements of a dataset as TRL's trainers read it: tokens of prompts, tokens of whole rows,
sizes of images.

The training interpreter runs it (`python .../autotune/worker prompts`, `rows` or `images`), with
one JSON object on stdin and one on stdout. All requests have

    "dataset": {"dataset_name": ..., "dataset_config": ..., "dataset_train_split": ..., "datasets":
    [...], ...}

and those that tokenise

    "model": "folder or hub id", "trust_remote_code": false, "model_revision": "main" | null,
    "chat_template_kwargs": {...} | null

`prompts` tokenises as GRPOTrainer does, and writes the rows within a limit: TRL has no limit on
prompts; a filtered dataset, loaded by `dataset_name: <out>`, provides one.

    {"limit": P | null, "out": "folder" | null} {"rows": n, "kept": n, "dropped": n,
    "longest_prompt": n, "longest_kept": n, "percentiles": {"50": n, ...},
     "splits": {"train": {"rows": n, "kept": n}}, "dataset_name": "out" | null}

`rows` measures for supervised fine-tuning, with template and end token. With a percentile's length
as the limit, `longer` rows exceed it. Truncating them removes `cut` tokens, leaving them out
`left_out` tokens.

    {"rows": n, "looked_at": n, "tokens": n, "percentiles": [{"share": 90, "length": n, "longer": n,
    "cut": n, "left_out": n}]}

`images` reads width and height of every image of a row, from its header alone. Of a dataset of the
hub, the first rows are read and nothing else is fetched.

    {"rows": n | null, "looked_at": n, "sizes": [[[width, height], ...], ...]}

For `rows` and `images` a large dataset is sampled at a regular stride, and the counts are of the
sample.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 95, 99, 100)
BATCH = 256


def load_splits(named: dict[str, Any]) -> dict[str, Any]:
    """Load the splits that TRL's script trains and evaluates on, by the same functions."""
    if named.get("datasets"):
        from trl import get_dataset
        from trl.scripts.utils import DatasetMixtureConfig

        parts = [dict(part) for part in named["datasets"]]
        return dict(
            get_dataset(
                DatasetMixtureConfig(datasets=parts, test_split_size=named.get("test_split_size"))
            )
        )
    from datasets import load_dataset

    loaded = load_dataset(named["dataset_name"], name=named.get("dataset_config"))
    wanted = (
        named.get("dataset_train_split") or "train",
        named.get("dataset_test_split") or "test",
    )
    splits = {name: loaded[name] for name in wanted if name in loaded}
    if wanted[0] not in splits:
        raise ValueError(f"the dataset has no split {wanted[0]!r}; it has {sorted(loaded)}")
    return splits


def load_tokenizer(request: dict[str, Any]) -> Any:
    """Load GRPOTrainer's tokenizer: the model's processor, if it has one."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        request["model"],
        revision=request.get("model_revision"),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )


def prompt_lengths(tokenizer: Any, prompts: Sequence[Any], options: dict[str, Any]) -> list[int]:
    """Tokens of each prompt, as in GRPOTrainer._tokenize_prompts."""
    if isinstance(prompts[0], str):
        return [len(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    ids = tokenizer.apply_chat_template(
        conversation=list(prompts),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **options,
    )["input_ids"]
    return [len(each) for each in ids]


def lengths_of(split: Any, tokenizer: Any, options: dict[str, Any]) -> list[int]:
    if "prompt" not in split.column_names:
        raise ValueError(f"the dataset has no column 'prompt'; it has {sorted(split.column_names)}")
    if not len(split):
        raise ValueError("the dataset has no rows")
    starts = range(0, len(split), BATCH)
    batches = (
        prompt_lengths(tokenizer, split[start : start + BATCH]["prompt"], options)
        for start in starts
    )
    return [length for batch in batches for length in batch]


def percentile(ordered: Sequence[int], share: int) -> int:
    """Smallest length that at least `share` per cent do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def prompt_figures(request: dict[str, Any]) -> dict[str, Any]:
    splits = load_splits(request["dataset"])
    tokenizer = load_tokenizer(request)
    limit, out = request.get("limit"), request.get("out")
    result: dict[str, Any] = {"splits": {}}
    for index, (name, split) in enumerate(splits.items()):
        lengths = lengths_of(split, tokenizer, request.get("chat_template_kwargs") or {})
        within = [row for row, length in enumerate(lengths) if limit is None or length <= limit]
        result["splits"][name] = {"rows": len(lengths), "kept": len(within)}
        if index == 0:
            ordered = sorted(lengths)
            result.update(
                rows=len(lengths),
                kept=len(within),
                dropped=len(lengths) - len(within),
                longest_prompt=ordered[-1],
                longest_kept=max((lengths[row] for row in within), default=None),
                percentiles={str(p): percentile(ordered, p) for p in PERCENTILES},
            )
            if not within:
                raise ValueError(
                    f"no prompt is within {limit} tokens; the shortest has {ordered[0]}"
                )
        if out and within:
            # Atomically, under the name by which `load_dataset` finds the split.
            data = Path(out) / "data"
            data.mkdir(parents=True, exist_ok=True)
            split.select(within).to_parquet(str(data / ".partial"))
            os.replace(data / ".partial", data / f"{name}-00000-of-00001.parquet")  # noqa: PTH105
    return {**result, "dataset_name": str(out) if out else None}


ROW_PERCENTILES = (50, 75, 90, 95, 99, 100)
MAX_ROWS = 20_000
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
PAIRS = (("prompt", "completion"), ("query", "response"), ("instruction", "output"))


def load_rows(named: dict[str, Any]) -> Any:
    """Load the training split of a file, a folder or a dataset of the hub."""
    from datasets import load_dataset

    if named.get("datasets"):
        return load_splits(named)["train"]
    place, split = str(named["dataset_name"]), named.get("dataset_train_split") or "train"
    if Path(place).is_file():
        return load_dataset(KINDS.get(Path(place).suffix, "json"), data_files=place, split="train")
    return load_dataset(place, name=named.get("dataset_config"), split=split)


def texts_of(rows: Any, tokenizer: Any, options: dict[str, Any]) -> Iterator[list[str]]:
    """Yield batches of rows as the text to tokenise."""
    columns = set(rows.column_names)
    pair = next((pair for pair in PAIRS if columns.issuperset(pair)), None)
    if not columns & {"messages", "text"} and pair is None:
        raise ValueError(
            "rows have none of the columns messages, text, prompt and completion; they have"
            f" {sorted(columns)}"
        )

    def templated(messages: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def with_end(text: Any) -> str:
        """Append the end token, as trainers do, unless it is there."""
        end = tokenizer.eos_token or ""
        return str(text) if str(text).endswith(end) else f"{text}{end}"

    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        if "messages" in columns:
            yield [templated(messages) for messages in batch["messages"]]
        elif "text" in columns:
            yield [with_end(text) for text in batch["text"]]
        elif pair is not None:
            halves = zip(batch[pair[0]], batch[pair[1]], strict=True)
            yield [
                templated([*one, *two]) if isinstance(one, list) else with_end(f"{one}{two}")
                for one, two in halves
            ]


def at_percentile(ordered: Sequence[int], share: int) -> dict[str, int]:
    """Return the length that `share` per cent of the rows do not exceed, and its effect."""
    length = percentile(ordered, share)
    longer = [one for one in ordered if one > length]
    total = sum(longer)
    return {
        "share": share,
        "length": length,
        "longer": len(longer),
        "cut": total - length * len(longer),
        "left_out": total,
    }


def row_figures(request: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    rows = load_rows(request["dataset"])
    if not len(rows):
        raise ValueError("the dataset has no rows")
    stride = -(-len(rows) // MAX_ROWS)
    trust = bool(request.get("trust_remote_code"))
    tokenizer = AutoTokenizer.from_pretrained(
        request["model"], revision=request.get("model_revision"), trust_remote_code=trust
    )
    sample = rows if stride == 1 else rows.select(range(0, len(rows), stride))
    batches = texts_of(sample, tokenizer, request.get("chat_template_kwargs") or {})
    ordered = sorted(
        len(ids)
        for texts in batches
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
    )
    percentiles = [at_percentile(ordered, share) for share in ROW_PERCENTILES]
    return {
        "rows": len(rows),
        "looked_at": len(ordered),
        "tokens": sum(ordered),
        "percentiles": percentiles,
    }


COLUMNS = ("images", "image")  # columns that TRL's trainers read
MAX_IMAGE_ROWS = 2_000
MAX_FETCHED_ROWS = 200
MAX_IMAGES = 256  # of one row


def image_sizes(request: dict[str, Any]) -> dict[str, Any]:
    from datasets import load_dataset

    # 1. The training split, and its length; None for one that is read from the hub row by row.
    named, number = request["dataset"], None
    place, split = str(named.get("dataset_name") or ""), named.get("dataset_train_split") or "train"
    if place and not Path(place).exists() and os.environ.get("HF_HUB_OFFLINE") != "1":
        rows = load_dataset(place, name=named.get("dataset_config"), split=split, streaming=True)
    else:
        rows = load_rows(named) if Path(place).is_file() else load_splits(named)[split]
        number = len(rows)
    # 2. The sizes of a sample
    column = next((name for name in COLUMNS if name in (rows.column_names or ())), None)
    if column is None or number == 0:
        return {"rows": number, "looked_at": 0, "sizes": []}
    sample = undecoded(rows.select_columns([column]), column)
    sample = (
        sample.take(MAX_FETCHED_ROWS)
        if number is None
        else sample.select(range(0, number, -(-number // MAX_IMAGE_ROWS)))
    )
    sizes = [
        [size_of(image) for image in itertools.islice(listed(row[column]), MAX_IMAGES)]
        for row in sample
    ]
    return {"rows": number, "looked_at": len(sizes), "sizes": sizes}


def undecoded(rows: Any, column: str) -> Any:
    """Return the rows with images as bytes or paths: decoding would read every pixel."""
    from datasets import Image

    feature, plain = rows.features[column], Image(decode=False)
    if isinstance(feature, Image):
        return rows.cast_column(column, plain)
    if isinstance(feature, list) and isinstance(feature[0], Image):
        return rows.cast_column(column, [plain])
    if isinstance(getattr(feature, "feature", None), Image):
        return rows.cast_column(column, type(feature)(plain))
    return rows


def listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def size_of(image: Any) -> list[int]:
    """Return width and height of an image given as bytes, as a path, or decoded."""
    from PIL import Image

    if isinstance(image, dict):
        image = BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
    if isinstance(image, str | BytesIO):
        with Image.open(image) as opened:
            return list(opened.size)
    return list(image.size)


def print_answer(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the request on stdin. Frameworks print to stdout, which is diverted to stderr."""
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        json.dump(answer(json.load(sys.stdin)), real)


def main() -> None:
    print_answer(
        {"prompts": prompt_figures, "rows": row_figures, "images": image_sizes}[sys.argv[1]]
    )
