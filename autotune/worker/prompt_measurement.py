"""Measures the prompts of a dataset as TRL tokenises them, and writes the rows within a limit.

The training interpreter runs it (`python .../autotune/worker prompts`), with one JSON object on
stdin and one on stdout:

    {"model": "folder or hub id", "dataset": {"dataset_name": ..., "datasets": [...], ...}, "limit": P | null,
     "out": "folder" | null, "trust_remote_code": false, "model_revision": "main" | null, "chat_template_kwargs": {...} | null}
    {"rows": n, "kept": n, "dropped": n, "longest_prompt": n, "longest_kept": n, "percentiles": {"50": n, ...},
     "splits": {"train": {"rows": n, "kept": n}}, "dataset_name": "out" | null}

TRL has no limit on prompts. A filtered dataset, loaded by `dataset_name: <out>`, provides one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
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
        return dict(get_dataset(DatasetMixtureConfig(datasets=parts, test_split_size=named.get("test_split_size"))))
    from datasets import load_dataset

    loaded = load_dataset(named["dataset_name"], name=named.get("dataset_config"))
    wanted = (named.get("dataset_train_split") or "train", named.get("dataset_test_split") or "test")
    splits = {name: loaded[name] for name in wanted if name in loaded}
    if wanted[0] not in splits:
        raise ValueError(f"the dataset has no split {wanted[0]!r}; it has {sorted(loaded)}")
    return splits


def load_tokenizer(request: dict[str, Any]) -> Any:
    """Load GRPOTrainer's tokenizer: the model's processor, if it has one."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        request["model"], revision=request.get("model_revision"), truncation_side="left", padding_side="left",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )  # fmt: skip


def prompt_lengths(tokenizer: Any, prompts: Sequence[Any], options: dict[str, Any]) -> list[int]:
    """Tokens of each prompt, as in GRPOTrainer._tokenize_prompts."""
    if isinstance(prompts[0], str):
        return [len(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    ids = tokenizer.apply_chat_template(
        conversation=list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )["input_ids"]
    return [len(each) for each in ids]


def lengths_of(split: Any, tokenizer: Any, options: dict[str, Any]) -> list[int]:
    if "prompt" not in split.column_names:
        raise ValueError(f"the dataset has no column 'prompt'; it has {sorted(split.column_names)}")
    if not len(split):
        raise ValueError("the dataset has no rows")
    starts = range(0, len(split), BATCH)
    batches = (prompt_lengths(tokenizer, split[start : start + BATCH]["prompt"], options) for start in starts)
    return [length for batch in batches for length in batch]


def percentile(ordered: Sequence[int], share: int) -> int:
    """Smallest length that at least `share` per cent do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
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
                rows=len(lengths), kept=len(within), dropped=len(lengths) - len(within), longest_prompt=ordered[-1],
                longest_kept=max((lengths[row] for row in within), default=None),
                percentiles={str(p): percentile(ordered, p) for p in PERCENTILES},
            )  # fmt: skip
            if not within:
                raise ValueError(f"no prompt is within {limit} tokens; the shortest has {ordered[0]}")
        if out and within:
            # Atomically, under the name by which `load_dataset` finds the split.
            data = Path(out) / "data"
            data.mkdir(parents=True, exist_ok=True)
            split.select(within).to_parquet(str(data / ".partial"))
            os.replace(data / ".partial", data / f"{name}-00000-of-00001.parquet")  # noqa: PTH105
    return {**result, "dataset_name": str(out) if out else None}


def print_answer(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the request on stdin. Frameworks print to stdout, which is diverted to stderr."""
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        json.dump(answer(json.load(sys.stdin)), real)


def main() -> None:
    print_answer(answer)
