"""What a run trains on: the user's prompts and rewards where they are given, made-up ones otherwise."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Reward = Any
"""A reward function, or the name of a reward model, as the trainer takes them."""


class RewardClock:
    """Seconds spent inside the user's own reward functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        """The same reward, timed. Coroutine functions stay such: the trainer runs them another way."""
        if inspect.iscoroutinefunction(reward):

            @functools.wraps(reward)
            async def timed_later(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                try:
                    return await reward(*args, **kwargs)
                finally:
                    self.seconds += time.perf_counter() - began

            return timed_later

        @functools.wraps(reward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return reward(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def made_up_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Costs nothing and differs within a group, so that advantages are not all zero."""
    return [(sum(ids) % 97) / 97 for ids in completion_ids]


def are_made_up(names: Sequence[str] | None, script: Mapping[str, Any] | None) -> bool:
    """Whether the user named no reward, so that one is made up."""
    return not names and not (script and script.get("reward_model_name_or_path"))


def rewards(names: Sequence[str] | None, script: Mapping[str, Any] | None, clock: RewardClock) -> list[Reward]:
    """The user's rewards as `trl grpo` would find them, or a made-up one."""
    found: list[Reward] = []
    if script and script.get("reward_model_name_or_path"):
        found.append(script["reward_model_name_or_path"])
    found += [clock.time(_reward(name)) for name in names or ()]
    return found or [made_up_reward]


def _reward(name: str) -> Callable[..., Any]:
    if "." in name:
        module, _, attribute = name.rpartition(".")
        here = str(Path.cwd())
        if here not in sys.path:  # as `trl grpo` does it: rewards lie beside where it is started
            sys.path.insert(0, here)
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    library = importlib.import_module("trl.rewards")
    if name == "get_soft_overlong_punishment":
        return library.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)  # type: ignore[no-any-return]
    if not hasattr(library, name):
        raise ValueError(f"Could not load reward function {name!r}: neither one of trl.rewards nor a dotted import path.")
    return getattr(library, name)  # type: ignore[no-any-return]


def prompts(script: Mapping[str, Any] | None, *, rows: int, group: int, tokenizer: Any, tokens: int, seed: int) -> Any:
    """A dataset of exactly `rows` rows, so that a run is one epoch without a remainder.

    `group` rows make one generation batch: a dataset shorter than that makes no batch at all in the real run either.
    """
    from datasets import Dataset

    source = users(script)
    if source is None:
        return Dataset.from_list(made_up_prompts(rows, tokenizer, tokens, seed))
    return exactly(source, rows=rows, group=group)


def users(script: Mapping[str, Any] | None) -> Any:
    """The user's own dataset; None where none was named."""
    return _users(script) if script and _names_data(script) else None


def exactly(source: Any, *, rows: int, group: int) -> Any:
    """So many rows of a dataset: its first ones, over again where it has fewer."""
    from datasets import Dataset

    if not hasattr(source, "select"):  # a stream
        source = Dataset.from_list(list(itertools.islice(source, rows)))
    if len(source) < group:
        raise ValueError(
            f"the training split has {len(source)} rows, and one generation batch takes {group} different prompts: "
            "no batch could be made. Use a larger split, more num_generations or a smaller batch."
        )
    return source.select([index % len(source) for index in range(rows)])


def _names_data(script: Mapping[str, Any]) -> bool:
    return bool(script.get("dataset_name") or script.get("datasets") or script.get("path"))


def _users(script: Mapping[str, Any]) -> Any:
    split = script.get("dataset_train_split") or "train"
    if script.get("datasets"):
        return _mixture(script, split)
    name = str(script.get("dataset_name") or script.get("path"))
    return _saved(name, split) or _loaded(name, script, split)


def _mixture(script: Mapping[str, Any], split: str) -> Any:
    import trl
    from trl.scripts.utils import DatasetConfig

    parts = [DatasetConfig(**part) if isinstance(part, Mapping) else part for part in script["datasets"]]
    streaming = bool(script.get("streaming") or script.get("dataset_streaming"))
    mixture = trl.get_dataset(trl.DatasetMixtureConfig(datasets=parts, streaming=streaming))
    return mixture[split]


def _saved(name: str, split: str) -> Any:
    """A folder that `save_to_disk` wrote; None for anything else."""
    folder = Path(name)
    if not any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return None
    from datasets import load_from_disk

    found = load_from_disk(name)
    return found[split] if isinstance(found, Mapping) else found


def _loaded(name: str, script: Mapping[str, Any], split: str) -> Any:
    from datasets import load_dataset

    return load_dataset(name, name=script.get("dataset_config"), streaming=bool(script.get("dataset_streaming")))[split]


def made_up_prompts(rows: int, tokenizer: Any, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Prompts that differ from their first word on: an engine's prefix cache saves nothing that it would not save in earnest."""
    draw = random.Random(seed)
    conversational = getattr(tokenizer, "chat_template", None) is not None
    made = []
    for _ in range(rows):
        # A word is at least one token: never too short, and longer ones are cut.
        text = " ".join(str(draw.randrange(10, 10_000)) for _ in range(max(4, min(tokens, 4096))))
        made.append({"prompt": [{"role": "user", "content": text}] if conversational else text})
    return made
