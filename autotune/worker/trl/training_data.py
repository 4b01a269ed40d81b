"""Training data of a run: the user's rows and rewards, or synthetic ones.

Synthetic rows with images have an exact length, from the model's own processor but without its
files. Of a user's dataset with images, the longest rows are taken: an image's tokens can't be cut
or repeated to a length.
"""

from __future__ import annotations

import functools
import heapq
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

from .. import synthetic
from ..dataset_sizes import COLUMNS, MAX_IMAGE_ROWS, listed, size_of, undecoded

# Rows with images that are repeated: different prompts, so that an engine's prefix cache does not
# shorten the rollout.
LONGEST = 8

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


def rewards(
    names: Sequence[str] | None, script: Mapping[str, Any] | None, clock: RewardClock
) -> list[Reward]:
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
        raise ValueError(
            f"Could not load reward function {name!r}: neither one of trl.rewards nor a dotted"
            " import path."
        )
    return getattr(library, name)  # type: ignore[no-any-return]


def exactly(source: Any, *, rows: int, group: int) -> Any:
    """Return the first `rows` rows of a dataset, repeated if it has fewer, so that a run is one
    epoch without a remainder.

    `group` rows are one generation batch; the real run cannot make a batch from a shorter dataset
    either.
    """
    from datasets import Dataset

    if not hasattr(source, "select"):  # a stream
        source = Dataset.from_list(list(itertools.islice(source, rows)))
    refuse_few_rows(source, group)
    return source.select([index % len(source) for index in range(rows)])


def refuse_few_rows(source: Any, group: int) -> None:
    if len(source) < group:
        raise ValueError(
            f"the training split has {len(source)} rows, and one generation batch takes {group}"
            " different prompts: no batch could be made. Use a larger split, more num_generations"
            " or a smaller batch."
        )


def user_dataset(script: Mapping[str, Any] | None) -> Any:
    """Load the user's dataset; None if none is named."""
    if not script or not (
        script.get("dataset_name") or script.get("datasets") or script.get("path")
    ):
        return None
    split = script.get("dataset_train_split") or "train"
    if script.get("datasets"):
        import trl
        from trl.scripts.utils import DatasetConfig

        parts = [
            DatasetConfig(**part) if isinstance(part, Mapping) else part
            for part in script["datasets"]
        ]
        streaming = bool(script.get("streaming") or script.get("dataset_streaming"))
        return trl.get_dataset(trl.DatasetMixtureConfig(datasets=parts, streaming=streaming))[split]
    from datasets import load_dataset, load_from_disk

    name = str(script.get("dataset_name") or script.get("path"))
    if any(
        (Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")
    ):  # of `save_to_disk`
        found = load_from_disk(name)
        return found[split] if isinstance(found, Mapping) else found
    return load_dataset(
        name, name=script.get("dataset_config"), streaming=bool(script.get("dataset_streaming"))
    )[split]


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
    holds_tokens = {
        n
        for n, value in first.items()
        if isinstance(value, list) and value and isinstance(value[0], int)
    }
    wanted = {name: length for name, length in columns.items() if length and name in holds_tokens}

    def fitted(row: Mapping[str, Any]) -> dict[str, list[int]]:
        return {
            name: (row[name] * -(-length // max(1, len(row[name]))))[:length]
            for name, length in wanted.items()
        }

    return rows.map(fitted) if wanted else rows


class TooManyImageTokens(ValueError):
    """A row is too short for its images."""


def processor_of(tokenizer: Any, config: Any, images: Mapping[str, Any]) -> Any:
    """Return transformers' processor of this architecture, for texts and images; videos and
    sound are left out.
    """
    kind = str(config.model_type)
    # The class of images in PIL has the shapes of every other one, and needs no torchvision.
    named = _auto("image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    options = dict(images["processor"])
    image_processor = _class_named(
        kind, str(named["pil"] if isinstance(named, Mapping) else named[0])
    )(**options)
    whole: Any = _class_named(kind, _auto("processing_auto").PROCESSOR_MAPPING_NAMES[kind])

    class Processor(whole):  # type: ignore[misc]
        """The processor with tensors that a trace sees, and without parts that no image needs."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return (
                None
                if argument is None
                else super().check_argument_for_proper_class(name, argument)
            )

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            import torch
            from torch._subclasses.fake_tensor import FakeTensor

            made = super().__call__(*args, **kwargs)
            for name, value in made.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    made[name] = value.clone()  # arrays become tensors without an operation
            return made

        def save_pretrained(self, folder: Any, **_: Any) -> list[str]:
            """Save the tokenizer alone, as with a checkpoint: a part that is left out can't be
            saved.
            """
            return list(self.tokenizer.save_pretrained(folder))

        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            """Return empty texts: decoding takes time, and its result is not used."""
            return [""] * len(rows)

    Processor.__name__ = whole.__name__
    parts = dict.fromkeys(whole.get_attributes())
    length = (
        {"image_seq_length": images["tokens"]}
        if "image_seq_length" in whole.__init__.__code__.co_varnames
        else {}
    )
    parts |= {"image_processor": image_processor, "tokenizer": tokenizer}
    made = Processor(**parts, **length)
    image, around = made.image_token, (tokenizer.boi_token, tokenizer.eoi_token)
    # Images side by side need tokens between them: their positions follow from runs of image
    # tokens.
    made.chat_template = synthetic.IMAGE_TEMPLATE.replace(
        "IMAGE", image if image in around else image.join(around)
    )
    return made


def _auto(name: str) -> Any:
    return importlib.import_module(f"transformers.models.auto.{name}")


def _class_named(kind: str, name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if found is not None and found.__module__.startswith("transformers.models."):
        return found
    raise ImportError(
        f"transformers {transformers.__version__} has no {name} for {kind}: install pillow, or a"
        " newer transformers"
    )


def with_ids(model: Any, tokenizer: Any) -> Any:
    """Return the model, which takes the tokenizer's ids for tokens of images."""
    for name, fields in synthetic.IMAGE_TOKEN_IDS.items():
        for field in fields:
            if hasattr(model.config, field):
                setattr(
                    model.config,
                    field,
                    tokenizer.convert_tokens_to_ids(synthetic.IMAGE_TOKENS[name]),
                )
    return model


def image_rows(
    processor: Any,
    images: Mapping[str, Any],
    column: str,
    tokens: int,
    rows: int,
    *,
    generates: bool,
) -> Any:
    """Return equal synthetic rows: a user's message that has this length as the trainer renders
    it, with its images.
    """
    from datasets import Dataset
    from PIL import Image

    pictures = [Image.new("RGB", (images["width"], images["height"]))] * int(images["count"])
    blank = [{"type": "image", "image": one} for one in pictures] + [{"type": "text", "text": ""}]
    rendered = processor.apply_chat_template(
        [[{"role": "user", "content": blank}]],
        add_generation_prompt=generates,
        tokenize=True,
        return_dict=True,
    )
    taken = len(rendered["input_ids"][0])
    if tokens < taken:
        raise TooManyImageTokens(
            f"a row of {tokens} tokens can't hold its images, which take {taken} tokens"
        )
    message = [
        {"role": "user", "content": "a" * (tokens - taken)}
    ]  # a letter is one token of a synthetic tokenizer
    return Dataset.from_dict({column: [message] * rows, "images": [pictures] * rows})


def longest_rows(source: Any, processor: Any, *, limit: int | None, rows: int, group: int) -> Any:
    """Return `rows` rows of the user's, the longest first; none is longer than `limit` tokens if
    any is within it.

    A stream can't be searched: its first rows are returned.
    """
    column = next((name for name in COLUMNS if name in (source.column_names or ())), None)
    if column is None or not hasattr(source, "select"):
        return exactly(source, rows=rows, group=group)
    refuse_few_rows(source, group)
    tokens = {
        index: _tokens(source[index], column, processor) for index in _shortlist(source, column)
    }
    within = [index for index, length in tokens.items() if limit is None or length <= limit]
    order = sorted(within or tokens, key=lambda index: tokens[index], reverse=bool(within))[
        :LONGEST
    ]
    return source.select([order[row % len(order)] for row in range(rows)])


def _shortlist(source: Any, column: str) -> set[int]:
    """Return rows with the most pixels, the most images and the longest texts."""
    sample = range(0, len(source), -(-len(source) // MAX_IMAGE_ROWS))
    images = undecoded(source.select_columns([column]), column)
    texts = source.remove_columns([column])
    sizes = {index: [size_of(image) for image in listed(images[index][column])] for index in sample}
    ranked: tuple[Callable[[int], int], ...] = (
        lambda index: sum(width * height for width, height in sizes[index]),
        lambda index: len(sizes[index]),
        lambda index: len(str(texts[index])),
    )
    return {index for rank in ranked for index in heapq.nlargest(LONGEST, sample, key=rank)}


def _tokens(row: Mapping[str, Any], column: str, processor: Any) -> int:
    """Return the length of a row with its images, as TRL prepares it."""
    from trl import prepare_multimodal_messages

    images = listed(row[column])
    said = row.get("prompt") or row.get("messages") or row.get("text") or ""
    answer = row.get("completion") or []
    if isinstance(said, str):
        made = processor(
            text=[said + (answer if isinstance(answer, str) else "")],
            images=[images] if images else None,
        )
    else:
        messages = [
            *prepare_multimodal_messages(said, images=images),
            *prepare_multimodal_messages(answer, images=[]),
        ]
        made = processor.apply_chat_template(
            [messages], tokenize=True, return_dict=True, add_generation_prompt=not answer
        )
    return len(made["input_ids"][0])
