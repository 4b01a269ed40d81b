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
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import synthetic
from ..dataset_sizes import MAX_IMAGE_ROWS, image_column, listed, size_of, undecoded
from ..protocol import Request

# Rows with images that are repeated: different prompts, so that an engine's prefix cache does not
# shorten the rollout.
LONGEST_WORD = 8

# Words of a synthetic prompt, each with at least one token.
MIN_WORDS = 4
MAX_WORDS = 4096

Reward = Any  # reward function, or name of a reward model, as the trainer takes them


# Rewards.


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
    names: Sequence[str] | None,
    script: Request | None,
    clock: RewardClock,
) -> list[Reward]:
    """Return the user's rewards as `trl grpo` finds them, or a synthetic one."""
    result: list[Reward] = []
    model_name = (script or {}).get("reward_model_name_or_path")
    if model_name:
        result.append(model_name)
    for name in names or ():
        result.append(clock.time(_reward_function(name)))
    return result or [synthetic_reward]


def _reward_function(name: str) -> Callable[..., Any]:
    if "." in name:
        module, _, attribute = name.rpartition(".")
        folder = str(Path.cwd())
        if folder not in sys.path:  # as in `trl grpo`: rewards are modules of the working directory
            sys.path.insert(0, folder)
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    library = importlib.import_module("trl.rewards")
    if name == "get_soft_overlong_punishment":
        penalty: Callable[..., Any] = library.get_soft_overlong_punishment(
            max_completion_len=1280,
            soft_punish_cache=256,
        )
        return penalty
    if not hasattr(library, name):
        raise ValueError(
            f"Could not load reward function {name!r}: neither one of trl.rewards nor a dotted"
            " import path."
        )
    return getattr(library, name)  # type: ignore[no-any-return]


# Rows of the user's dataset.


def user_dataset(script: Request | None) -> Any:
    """Load the user's dataset; None if none is named."""
    if not script:
        return None
    split = script.get("dataset_train_split") or "train"
    if script.get("datasets"):
        return _mixture(script)[split]
    name = script.get("dataset_name") or script.get("path")
    if not name:
        return None
    from datasets import load_dataset, load_from_disk

    name = str(name)
    if _is_saved_to_disk(Path(name)):
        saved = load_from_disk(name)
        return saved[split] if isinstance(saved, Mapping) else saved
    config = script.get("dataset_config")
    streaming = bool(script.get("dataset_streaming"))
    return load_dataset(name, name=config, streaming=streaming)[split]


def _mixture(script: Request) -> Any:
    import trl
    from trl.scripts.utils import DatasetConfig

    parts = []
    for part in script["datasets"]:
        parts.append(DatasetConfig(**part) if isinstance(part, Mapping) else part)
    streaming = bool(script.get("streaming") or script.get("dataset_streaming"))
    mixture = trl.DatasetMixtureConfig(datasets=parts, streaming=streaming)
    return trl.get_dataset(mixture)


def _is_saved_to_disk(folder: Path) -> bool:
    """Return True for a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def exactly(
    source: Any,
    *,
    rows: int,
    min_rows: int,
) -> Any:
    """Return the first `rows` rows of a dataset, repeated if it has fewer, so that a run is one
    epoch without a remainder.

    `min_rows` make one generation batch; the real run cannot make a batch from a shorter dataset
    either.
    """
    from datasets import Dataset

    if not hasattr(source, "select"):  # a stream
        first_rows = list(itertools.islice(source, rows))
        source = Dataset.from_list(first_rows)
    refuse_few_rows(source, min_rows)
    return source.select([index % len(source) for index in range(rows)])


def refuse_few_rows(source: Any, min_rows: int) -> None:
    if len(source) < min_rows:
        raise ValueError(
            f"the training split has too few rows ({len(source)}): one generation batch takes"
            f" {min_rows} different prompts. Use a larger split, more num_generations"
            " or a smaller batch."
        )


def fit_columns(rows: Any, lengths: Mapping[str, int]) -> Any:
    """Give each column of tokens exactly its length: repeat shorter rows, cut longer ones.

    `lengths[""]` is the length of columns that are not named.
    """
    first = next(iter(rows), None) or {}
    forced = {}
    for name in rows.column_names:
        length = lengths.get(name, lengths.get(""))
        if length and _holds_tokens(first.get(name)):
            forced[name] = length

    def fitted(row: Mapping[str, Any]) -> dict[str, list[int]]:
        columns = {}
        for name, length in forced.items():
            tokens = row[name]
            word_tokens = max(1, len(tokens))
            repetitions = math.ceil(length / word_tokens)
            columns[name] = (tokens * repetitions)[:length]
        return columns

    return rows.map(fitted) if forced else rows


def _holds_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


# Synthetic rows.


def synthetic_prompts(
    rows: int,
    tokenizer: Any,
    tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return prompts that differ from the first word on: no additional prefix-cache hits."""
    draw = random.Random(seed)
    # Each word has at least one token: prompts are never too short, and longer ones are cut.
    word_count = max(MIN_WORDS, min(tokens, MAX_WORDS))
    is_conversational = getattr(tokenizer, "chat_template", None) is not None
    prompts = []
    for _ in range(rows):
        prompt: Any = synthetic_text(word_count, draw)
        if is_conversational:
            prompt = [{"role": "user", "content": prompt}]
        prompts.append({"prompt": prompt})
    return prompts


def synthetic_text(word_count: int, draw: random.Random) -> str:
    """Return numbers: each is a word of its own."""
    numbers = [draw.randrange(10, 10_000) for _ in range(word_count)]
    return " ".join(map(str, numbers))


# Rows with images.


class TooManyImageTokens(ValueError):
    """A row is too short for its images."""


def processor_of(
    tokenizer: Any,
    config: Any,
    images: Request,
) -> Any:
    """Return transformers' processor of this architecture, for texts and images.

    Videos and sound are left out.
    """
    # 1. The part for images. Its class for PIL has the shapes of every other one, and needs no
    # torchvision.
    kind = str(config.model_type)
    class_names = _auto("image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    class_name = class_names["pil"] if isinstance(class_names, Mapping) else class_names[0]
    processor_class = _class_named(kind, str(class_name))
    image_processor = processor_class(**images["processor"])

    # 2. The processor: of its other parts, only the tokenizer.
    class_names_by_kind = _auto("processing_auto").PROCESSOR_MAPPING_NAMES
    full_class = _class_named(kind, class_names_by_kind[kind])
    arguments = dict.fromkeys(full_class.get_attributes())
    arguments |= {"image_processor": image_processor, "tokenizer": tokenizer}
    if "image_seq_length" in full_class.__init__.__code__.co_varnames:
        arguments["image_seq_length"] = images["tokens"]
    processor = _for_images_only(full_class)(**arguments)

    # 3. The template. Images side by side need tokens between them: their positions follow from
    # runs of image tokens.
    image = processor.image_token
    separators = (tokenizer.boi_token, tokenizer.eoi_token)
    if image not in separators:
        image = image.join(separators)
    processor.chat_template = synthetic.IMAGE_TEMPLATE.replace("IMAGE", image)
    return processor


def _for_images_only(full_class: Any) -> Any:
    """Return the processor's class with tensors that a trace sees, and without parts that no image
    needs.
    """

    class Processor(full_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is None:  # a part that is left out
                return None
            return super().check_argument_for_proper_class(name, argument)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            import torch
            from torch._subclasses.fake_tensor import FakeTensor

            batch = super().__call__(*args, **kwargs)
            for name, value in batch.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    batch[name] = value.clone()  # arrays become tensors without an operation
            return batch

        def save_pretrained(self, folder: Any, **_: Any) -> list[str]:
            """Save the tokenizer alone, as with a checkpoint: a part that is left out can't be
            saved.
            """
            return list(self.tokenizer.save_pretrained(folder))

        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            """Return empty texts: decoding takes time, and its result is not used."""
            return [""] * len(rows)

    Processor.__name__ = full_class.__name__
    return Processor


def _auto(name: str) -> Any:
    return importlib.import_module(f"transformers.models.auto.{name}")


def _class_named(kind: str, name: str) -> Any:
    import transformers

    result = getattr(transformers, name, None)
    if result is not None and result.__module__.startswith("transformers.models."):
        return result
    raise ImportError(
        f"transformers {transformers.__version__} has no {name} for {kind}: install pillow, or a"
        " newer transformers"
    )


def with_ids(model: Any, tokenizer: Any) -> Any:
    """Return the model, which takes the tokenizer's ids for tokens of images."""
    for name, fields in synthetic.IMAGE_TOKEN_IDS.items():
        for field in fields:
            if hasattr(model.config, field):
                token_id = tokenizer.convert_tokens_to_ids(synthetic.IMAGE_TOKENS[name])
                setattr(model.config, field, token_id)
    return model


def image_rows(
    processor: Any,
    images: Request,
    column: str,
    tokens: int,
    rows: int,
    *,
    generates: bool,
) -> Any:
    """Return equal synthetic rows: a user's message with images.

    The message has this length as the trainer renders it.
    """
    from datasets import Dataset
    from PIL import Image

    size = images["width"], images["height"]
    picture = Image.new("RGB", size)
    pictures = [picture] * int(images["count"])
    content: list[dict[str, Any]] = []
    for _ in pictures:
        content.append({"type": "image", "image": picture})
    content.append({"type": "text", "text": ""})
    rendered = processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        add_generation_prompt=generates,
        tokenize=True,
        return_dict=True,
    )
    image_tokens = len(rendered["input_ids"][0])
    if tokens < image_tokens:
        raise TooManyImageTokens(
            f"a row of {tokens} tokens can't hold its images, which take {image_tokens} tokens"
        )
    text = "a" * (tokens - image_tokens)  # a letter is one token of a synthetic tokenizer
    message = [{"role": "user", "content": text}]
    return Dataset.from_dict({column: [message] * rows, "images": [pictures] * rows})


def longest_rows(
    source: Any,
    processor: Any,
    *,
    limit: int | None,
    rows: int,
    min_rows: int,
) -> Any:
    """Return `rows` rows of the user's, the longest first.

    None is longer than `limit` tokens if any is within it. A stream can't be searched: its first
    rows are returned.
    """
    column = image_column(source)
    if column is None or not hasattr(source, "select"):
        return exactly(source, rows=rows, min_rows=min_rows)
    refuse_few_rows(source, min_rows)
    tokens = {}
    for index in _shortlist(source, column):
        tokens[index] = _tokens(source[index], column, processor)
    within_limit = [index for index in tokens if limit is None or tokens[index] <= limit]
    if within_limit:
        order = sorted(within_limit, key=tokens.__getitem__, reverse=True)
    else:
        order = sorted(tokens, key=tokens.__getitem__)
    repeated = itertools.cycle(order[:LONGEST_WORD])
    repeated_rows = list(itertools.islice(repeated, rows))
    return source.select(repeated_rows)


def _shortlist(source: Any, column: str) -> set[int]:
    """Return rows with the most pixels, the most images and the longest texts."""
    stride = math.ceil(len(source) / MAX_IMAGE_ROWS)
    sample = range(0, len(source), stride)
    images = undecoded(source.select_columns([column]), column)
    texts = source.remove_columns([column])
    pixels = {}
    image_counts = {}
    text_lengths = {}
    for index in sample:
        row_images = listed(images[index][column])
        sizes = [size_of(image) for image in row_images]
        pixels[index] = sum(width * height for width, height in sizes)
        image_counts[index] = len(sizes)
        text_lengths[index] = len(str(texts[index]))

    shortlist: set[int] = set()
    for measure in (pixels, image_counts, text_lengths):
        shortlist.update(heapq.nlargest(LONGEST_WORD, sample, key=measure.__getitem__))
    return shortlist


def _tokens(
    row: Mapping[str, Any],
    column: str,
    processor: Any,
) -> int:
    """Return the length of a row with its images, as TRL prepares it."""
    from trl import prepare_multimodal_messages

    images = listed(row[column])
    prompt = row.get("prompt") or row.get("messages") or row.get("text") or ""
    answer = row.get("completion") or []
    if isinstance(prompt, str):
        text = prompt + answer if isinstance(answer, str) else prompt
        encoded = processor(text=[text], images=[images] if images else None)
    else:
        messages = [
            *prepare_multimodal_messages(prompt, images=images),
            *prepare_multimodal_messages(answer, images=[]),
        ]
        encoded = processor.apply_chat_template(
            [messages],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not answer,
        )
    return len(encoded["input_ids"][0])
