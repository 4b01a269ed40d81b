"""Measures a dataset for supervised fine-tuning: whole rows with template and end token.

The training interpreter runs it (`python .../autotune/worker rows`), with one JSON object on stdin and one on stdout:

    {"model": "folder or hub id", "dataset": {"dataset_name": ..., "dataset_config": ..., "dataset_train_split": ...},
     "trust_remote_code": false, "model_revision": "main" | null, "chat_template_kwargs": {...} | null}
    {"rows": n, "looked_at": n, "tokens": n, "percentiles": [{"share": 90, "length": n, "longer": n, "cut": n, "left_out": n}]}

With a percentile's length as the limit, `longer` rows exceed it. Truncating them removes `cut` tokens, leaving them out
`left_out` tokens. A large dataset is sampled at a regular stride, and the counts are of the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .prompt_measurement import BATCH, load_splits, percentile, print_answer

PERCENTILES = (50, 75, 90, 95, 99, 100)
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
        raise ValueError(f"rows have none of the columns messages, text, prompt and completion; they have {sorted(columns)}")

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
            yield [templated([*one, *two]) if isinstance(one, list) else with_end(f"{one}{two}") for one, two in halves]


def at_percentile(ordered: Sequence[int], share: int) -> dict[str, int]:
    """Return the length that `share` per cent of the rows do not exceed, and its effect."""
    length = percentile(ordered, share)
    longer = [one for one in ordered if one > length]
    total = sum(longer)
    return {"share": share, "length": length, "longer": len(longer), "cut": total - length * len(longer), "left_out": total}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    rows = load_rows(request["dataset"])
    if not len(rows):
        raise ValueError("the dataset has no rows")
    stride = -(-len(rows) // MAX_ROWS)
    trust = bool(request.get("trust_remote_code"))
    tokenizer = AutoTokenizer.from_pretrained(request["model"], revision=request.get("model_revision"), trust_remote_code=trust)
    sample = rows if stride == 1 else rows.select(range(0, len(rows), stride))
    batches = texts_of(sample, tokenizer, request.get("chat_template_kwargs") or {})
    ordered = sorted(len(ids) for texts in batches for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    percentiles = [at_percentile(ordered, share) for share in PERCENTILES]
    return {"rows": len(rows), "looked_at": len(ordered), "tokens": sum(ordered), "percentiles": percentiles}


def main() -> None:
    print_answer(answer)
