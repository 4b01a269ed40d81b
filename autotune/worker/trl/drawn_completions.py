"""Completions of the lengths that occur: every sequence of a generation ends at a drawn length.

vLLM takes the length of each prompt's completion. transformers generates the whole batch until its longest completion ends, as
in training: a logits processor makes each row emit the end token at its length, and no earlier.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# Settings of transformers' own engine, whose requests share one length.
SAME_FOR_ALL = ("use_transformers_paged", "use_transformers_continuous_batching")


def possible(settings: Mapping[str, Any]) -> bool:
    """Return True if each completion can have its own length. A server takes one for all."""
    if settings.get("use_vllm"):
        return settings.get("vllm_mode") != "server"
    return not any(settings.get(name) for name in SAME_FOR_ALL)


class LengthDraws:
    """Lengths of one generation after the other: evenly spaced quantiles in random order.

    Equal prompts get equal lengths: candidates with the same batch are compared on the same draw, and the ranks of one engine,
    which generate together, agree.
    """

    def __init__(self, sample: Sequence[int], seed: int) -> None:
        self._sample, self._seed, self._turns = sorted(sample), seed, 0

    def take(self, prompts: Sequence[Any]) -> list[int]:
        self._turns += 1
        chance = random.Random(zlib.crc32(repr([self._seed, self._turns, *prompts]).encode()))
        count, size = len(prompts), len(self._sample)
        drawn = [self._sample[min(size - 1, int((place + chance.random()) / count * size))] for place in range(count)]
        chance.shuffle(drawn)
        return drawn


@contextmanager
def ending_at(draws: LengthDraws | None, trainer: Any, model: Any) -> Iterator[None]:
    """Make the trainer's engine, or its own model, end completions at drawn lengths."""
    if draws is None:
        yield
        return
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or getattr(trainer, "llm", None)
    by_engine: Any = getattr(engine, "generate", None)
    by_model = model.generate

    def engine_generate(prompts: Sequence[Any], sampling_params: Any, **rest: Any) -> Any:
        each = []
        for length in draws.take([_tokens(prompt) for prompt in prompts]):
            one = sampling_params.clone()
            one.min_tokens = one.max_tokens = length
            each.append(one)
        return by_engine(prompts, sampling_params=each, **rest)

    def model_generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        ends = generation_config.eos_token_id
        ends = list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [int(ends)]
        if not ends:
            raise ValueError("completions of drawn lengths need an end token, and this tokenizer has none.")
        processor = _EndAt(draws.take(ids.tolist()), ends, prompt=ids.shape[1], longest=generation_config.max_new_tokens)
        processors = [*(kwargs.pop("logits_processor", None) or ()), processor]
        return by_model(*args, generation_config=generation_config, logits_processor=processors, **kwargs)

    if engine is not None:
        engine.generate = engine_generate
    model.generate = model_generate
    try:
        yield
    finally:
        del model.generate
        if engine is not None:
            del engine.generate


def _tokens(prompt: Any) -> Any:
    """Return the tokens of a prompt; its images have no text of their own."""
    return prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt


class _EndAt:
    """Logits processor: row i emits the end token as its token number lengths[i].

    A row of the longest length never emits one, as one that is cut off there.
    """

    def __init__(self, lengths: Sequence[int], ends: Sequence[int], *, prompt: int, longest: int) -> None:
        self._ends, self._prompt = list(ends), prompt
        self._rows: dict[int, list[int]] = {}  # rows that end, by their length
        for row, length in enumerate(lengths):
            if length < longest:
                self._rows.setdefault(length, []).append(row)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, self._ends] = -float("inf")
        rows = self._rows.get(input_ids.shape[1] - self._prompt + 1)
        if rows:
            scores[rows] = -float("inf")
            scores[rows, self._ends[0]] = 0.0
        return scores
