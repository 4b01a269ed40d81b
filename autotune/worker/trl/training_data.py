"""Training data of a run: the user's prompts and rewards, or synthetic ones."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Reward = Any  # reward function, or name of a reward model, as the trainer takes them


class RewardClock:
    """Seconds inside the user's own reward functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def _running(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def time(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the reward with its time counted; a coroutine function stays one."""
        if inspect.iscoroutinefunction(reward):

            @functools.wraps(reward)
            async def timed_later(*args: Any, **kwargs: Any) -> Any:
                with self._running():
                    return await reward(*args, **kwargs)

            return timed_later

        @functools.wraps(reward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._running():
                return reward(*args, **kwargs)

        return timed


def synthetic_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return rewards that differ within a group, so that not all advantages are zero."""
    return [(sum(ids) % 97) / 97 for ids in completion_ids]


def rewards(names: Sequence[str] | None, script: Mapping[str, Any] | None, clock: RewardClock) -> list[Reward]:
    """Return the user's rewards as `trl grpo` finds them, or a synthetic one."""
    model = (script or {}).get("reward_model_name_or_path")
    functions = [clock.time(_reward(name)) for name in names or ()]
    return [*([model] if model else []), *functions] or [synthetic_reward]


def _reward(name: str) -> Callable[..., Any]:
    if "." in name:
        module, _, attribute = name.rpartition(".")
        here = str(Path.cwd())
        if here not in sys.path:  # as in `trl grpo`: rewards are modules of the working directory
            sys.path.insert(0, here)
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    library = importlib.import_module("trl.rewards")
    if name == "get_soft_overlong_punishment":
        return library.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)  # type: ignore[no-any-return]
    if not hasattr(library, name):
        raise ValueError(f"Could not load reward function {name!r}: neither one of trl.rewards nor a dotted import path.")
    return getattr(library, name)  # type: ignore[no-any-return]


def exactly(source: Any, *, rows: int, group: int) -> Any:
    """Return the first `rows` rows of a dataset, repeated if it has fewer, so that a run is one epoch without a remainder.

    `group` rows are one generation batch; the real run cannot make a batch from a shorter dataset either.
    """
    from datasets import Dataset

    if not hasattr(source, "select"):  # a stream
        source = Dataset.from_list(list(itertools.islice(source, rows)))
    refuse_few_rows(source, group)
    return source.select([index % len(source) for index in range(rows)])


def refuse_few_rows(source: Any, group: int) -> None:
    if len(source) < group:
        raise ValueError(
            f"the training split has {len(source)} rows, and one generation batch takes {group} different prompts: "
            "no batch could be made. Use a larger split, more num_generations or a smaller batch."
        )


def user_dataset(script: Mapping[str, Any] | None) -> Any:
    """Load the user's dataset; None if none is named."""
    if not script or not (script.get("dataset_name") or script.get("datasets") or script.get("path")):
        return None
    split = script.get("dataset_train_split") or "train"
    if script.get("datasets"):
        import trl
        from trl.scripts.utils import DatasetConfig

        parts = [DatasetConfig(**part) if isinstance(part, Mapping) else part for part in script["datasets"]]
        streaming = bool(script.get("streaming") or script.get("dataset_streaming"))
        return trl.get_dataset(trl.DatasetMixtureConfig(datasets=parts, streaming=streaming))[split]
    from datasets import load_dataset, load_from_disk

    name = str(script.get("dataset_name") or script.get("path"))
    if any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):  # of `save_to_disk`
        found = load_from_disk(name)
        return found[split] if isinstance(found, Mapping) else found
    return load_dataset(name, name=script.get("dataset_config"), streaming=bool(script.get("dataset_streaming")))[split]


def synthetic_prompts(rows: int, tokenizer: Any, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return prompts that differ from the first word on: no additional prefix-cache hits."""
    draw = random.Random(seed)
    conversational = getattr(tokenizer, "chat_template", None) is not None
    made = []
    for _ in range(rows):
        # Each word has at least one token: prompts are never too short, and longer ones are cut.
        text = " ".join(str(draw.randrange(10, 10_000)) for _ in range(max(4, min(tokens, 4096))))
        made.append({"prompt": [{"role": "user", "content": text}] if conversational else text})
    return made


def fit_columns(rows: Any, lengths: Mapping[str, int]) -> Any:
    """Give each column of tokens exactly its length: repeat shorter rows, cut longer ones."""
    first = next(iter(rows), None) or {}
    columns = {name: lengths.get(name, lengths.get("")) for name in rows.column_names}
    holds_tokens = {n for n, value in first.items() if isinstance(value, list) and value and isinstance(value[0], int)}
    wanted = {name: length for name, length in columns.items() if length and name in holds_tokens}

    def fitted(row: Mapping[str, Any]) -> dict[str, list[int]]:
        return {name: (row[name] * -(-length // max(1, len(row[name]))))[:length] for name, length in wanted.items()}

    return rows.map(fitted) if wanted else rows
