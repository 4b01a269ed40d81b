"""Measures the rows of a dataset for supervised fine-tuning as they are trained on: whole, template and end among their tokens.

Run by path under the training interpreter; the request is one JSON object on stdin, the answer one on stdout:

    {"model": "folder or hub id", "dataset": {"dataset_name": ..., "dataset_config": ..., "dataset_train_split": ...},
     "trust_remote_code": false, "model_revision": "main" | null, "chat_template_kwargs": {...} | null}
    {"rows": n, "looked_at": n, "tokens": n, "percentiles": [{"share": 90, "length": n, "longer": n, "cut": n, "left_out": n}]}

At a percentile's length, `longer` rows are above it; `cut` tokens go where these are truncated, `left_out` where they are left
out. Of a large dataset every so-many-th row is looked at, and the counts are of those.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PERCENTILES = (50, 75, 90, 95, 99, 100)
BATCH = 256
MOST_ROWS = 20_000
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
PAIRS = (("prompt", "completion"), ("query", "response"), ("instruction", "output"))


def load_rows(named: dict[str, Any]) -> Any:
    """The split that is trained on: a file's, a folder's, or one of the hub."""
    from datasets import load_dataset

    place, split = str(named["dataset_name"]), named.get("dataset_train_split") or "train"
    if Path(place).is_file():
        return load_dataset(KINDS.get(Path(place).suffix, "json"), data_files=place, split="train")
    return load_dataset(place, name=named.get("dataset_config"), split=split)


def texts_of(rows: Any, tokenizer: Any, options: dict[str, Any]) -> Iterator[list[str]]:
    """Batches of rows as the text that is tokenised."""
    columns = set(rows.column_names)
    pair = next((pair for pair in PAIRS if columns.issuperset(pair)), None)
    if not columns & {"messages", "text"} and pair is None:
        raise ValueError(f"rows have none of the columns messages, text, prompt and completion; they have {sorted(columns)}")
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        if "messages" in columns:
            yield [templated(tokenizer, messages, options) for messages in batch["messages"]]
        elif "text" in columns:
            yield [ended(text, tokenizer) for text in batch["text"]]
        elif pair is not None:
            halves = zip(batch[pair[0]], batch[pair[1]], strict=True)
            yield [joined(first, second, tokenizer, options) for first, second in halves]


def templated(tokenizer: Any, messages: Any, options: dict[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def joined(prompt: Any, completion: Any, tokenizer: Any, options: dict[str, Any]) -> str:
    if isinstance(prompt, list):
        return templated(tokenizer, [*prompt, *completion], options)
    return ended(f"{prompt}{completion}", tokenizer)


def ended(text: Any, tokenizer: Any) -> str:
    """Trainers put the end of a text behind it where it has none."""
    end = tokenizer.eos_token or ""
    return str(text) if str(text).endswith(end) else f"{text}{end}"


def lengths_of(rows: Any, tokenizer: Any, options: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for texts in texts_of(rows, tokenizer, options):
        found += [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return found


def at_percentile(ordered: Sequence[int], share: int) -> dict[str, int]:
    """The smallest length that so many per cent of the rows do not exceed, and what goes with it as the limit."""
    length = ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]
    longer = [one for one in ordered if one > length]
    total = sum(longer)
    return {"share": share, "length": length, "longer": len(longer), "cut": total - length * len(longer), "left_out": total}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    rows = load_rows(request["dataset"])
    if not len(rows):
        raise ValueError("the dataset has no rows")
    every = -(-len(rows) // MOST_ROWS)
    trust = bool(request.get("trust_remote_code"))
    tokenizer = AutoTokenizer.from_pretrained(request["model"], revision=request.get("model_revision"), trust_remote_code=trust)
    looked = rows if every == 1 else rows.select(range(0, len(rows), every))
    ordered = sorted(lengths_of(looked, tokenizer, request.get("chat_template_kwargs") or {}))
    at = [at_percentile(ordered, share) for share in PERCENTILES]
    return {"rows": len(rows), "looked_at": len(ordered), "tokens": sum(ordered), "percentiles": at}


def main() -> None:
    # Libraries print to stdout; the answer goes to the real one, everything else to stderr.
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        json.dump(answer(json.load(sys.stdin)), real)


if __name__ == "__main__":
    main()
