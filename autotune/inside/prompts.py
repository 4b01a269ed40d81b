"""Measures a dataset's prompts as TRL tokenises them, and keeps the rows within a limit.

Run by path under the training interpreter; the request is one JSON object on stdin, the answer one on stdout:

    {"model": "folder or hub id", "dataset": {"dataset_name": ..., "datasets": [...], ...}, "limit": P | null,
     "out": "folder" | null, "trust_remote_code": false, "model_revision": "main" | null, "chat_template_kwargs": {...} | null}
    {"rows": n, "kept": n, "dropped": n, "longest_prompt": n, "longest_kept": n, "percentiles": {"50": n, ...},
     "splits": {"train": {"rows": n, "kept": n}}, "dataset_name": "out" | null}

TRL has no limit on prompts; a filtered dataset, which `dataset_name: <out>` loads, is how there is one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 95, 99, 100)
BATCH = 256


def load_splits(named: dict[str, Any]) -> dict[str, Any]:
    """The splits that TRL's script would train and evaluate on, loaded the way it loads them."""
    if named.get("datasets"):
        from trl import get_dataset
        from trl.scripts.utils import DatasetMixtureConfig

        mixture = DatasetMixtureConfig(
            datasets=[dict(part) for part in named["datasets"]], test_split_size=named.get("test_split_size")
        )
        return dict(get_dataset(mixture))
    from datasets import load_dataset

    loaded = load_dataset(named["dataset_name"], name=named.get("dataset_config"))
    wanted = (named.get("dataset_train_split") or "train", named.get("dataset_test_split") or "test")
    splits = {name: loaded[name] for name in wanted if name in loaded}
    if wanted[0] not in splits:
        raise ValueError(f"the dataset has no split {wanted[0]!r}; it has {sorted(loaded)}")
    return splits


def load_tokenizer(request: dict[str, Any]) -> Any:
    """What GRPOTrainer tokenises with: the model's processor, where it has one."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        request["model"],
        revision=request.get("model_revision"),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=bool(request.get("trust_remote_code")),
    )


def prompt_lengths(tokenizer: Any, prompts: Sequence[Any], options: dict[str, Any]) -> list[int]:
    """Tokens of each prompt, as GRPOTrainer._tokenize_prompts makes them."""
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
    lengths: list[int] = []
    for start in range(0, len(split), BATCH):
        lengths += prompt_lengths(tokenizer, split[start : start + BATCH]["prompt"], options)
    return lengths


def percentile(ordered: Sequence[int], share: int) -> int:
    """The smallest length that at least `share` per cent of the prompts do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def keep(split: Any, lengths: Iterable[int], limit: int | None) -> Any:
    return split.select([row for row, length in enumerate(lengths) if limit is None or length <= limit])


def write_split(kept: Any, name: str, folder: Path) -> None:
    """Parquet under a name from which `load_dataset(folder)` reads the split's, in place at once or not at all."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    final = data / f"{name}-00000-of-00001.parquet"
    kept.to_parquet(str(data / ".partial"))
    os.replace(data / ".partial", final)  # noqa: PTH105


def answer(request: dict[str, Any]) -> dict[str, Any]:
    splits = load_splits(request["dataset"])
    tokenizer = load_tokenizer(request)
    limit, out = request.get("limit"), request.get("out")
    told: dict[str, Any] = {"splits": {}}
    for index, (name, split) in enumerate(splits.items()):
        lengths = lengths_of(split, tokenizer, request.get("chat_template_kwargs") or {})
        within = [length for length in lengths if limit is None or length <= limit]
        told["splits"][name] = {"rows": len(lengths), "kept": len(within)}
        if index == 0:
            ordered = sorted(lengths)
            told.update(
                rows=len(lengths), kept=len(within), dropped=len(lengths) - len(within), longest_prompt=ordered[-1],
                longest_kept=max(within, default=None), percentiles={str(p): percentile(ordered, p) for p in PERCENTILES},
            )  # fmt: skip
            if not within:
                raise ValueError(f"no prompt is within {limit} tokens; the shortest has {ordered[0]}")
        if out and within:
            write_split(keep(split, lengths, limit), name, Path(out))
    return {**told, "dataset_name": str(out) if out else None}


def main() -> None:
    # Frameworks print to stdout; the answer goes to the real one, everything else to stderr.
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        json.dump(answer(json.load(sys.stdin)), real)


if __name__ == "__main__":
    main()
