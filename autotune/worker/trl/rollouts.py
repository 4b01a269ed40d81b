"""Rollouts of a run: those of an earlier candidate with the same batch, and completions of the
lengths that occur.

Reuse: with the same generation batch and engine, micro-batch, accumulation and checkpointing do not
affect generation. A later candidate then only trains, on completions of an earlier one, and its
result includes the seconds measured there. Reuse is reported and never part of a certificate: the
longer probe of a finalist generates.

Varied lengths: all short, all half as long, all of the longest length, then rows of all three.
Blocks that an allocator kept for shorter rows are too small for longer ones, so memory may peak
where the longest rows alone do not.

Drawn lengths: vLLM takes the length of each prompt's completion. transformers generates the whole
batch until its longest completion ends, as in training: a logits processor makes each row emit the
end token at its length, and no earlier.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..protocol import Settings

# Settings without effect on a rollout, apart from the rows of a whole generation batch.
NOT_IN_GENERATION = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "torch_empty_cache_steps",
    }
)
REUSED_PHASES = ("rollout", "sync")  # phases of one generation
MAX_CACHED_ROLLOUTS = 8  # generation batches in the cache; each has a few megabytes of token ids


# Reuse.


@dataclass(frozen=True)
class CachedRollout:
    """Generation batch and its cost."""

    # what TRL's method returns: token ids, and their log-probabilities if the engine has them
    answer: Any
    seconds: Mapping[str, float]  # median over the generations after the first, by phase
    peak_bytes: Mapping[str, int]  # peak memory of the process, by phase


class RolloutCache(dict[str, CachedRollout]):
    """Latest generation batches of one rank since its load."""

    def put(self, key: str, rollout: CachedRollout) -> None:
        self.pop(key, None)
        self[key] = rollout
        while len(self) > MAX_CACHED_ROLLOUTS:
            oldest = next(iter(self))
            del self[oldest]


def key_of(
    settings: Settings,
    *,
    rows: int,
    prompt: int | None,
    completion: int,
    typical: bool,
    seed: int,
) -> str:
    """Key that is equal for equal rollouts."""
    relevant = {}
    for name, value in sorted(settings.items()):
        if name not in NOT_IN_GENERATION:
            relevant[name] = str(value)
    return json.dumps([relevant, rows, prompt, completion, typical, seed])


@dataclass
class Rollouts:
    """Generations of one run."""

    recorder: Any
    source: CachedRollout | None = None  # rollout to reuse; None runs all generations
    # generations that run in any case, for their effect on an allocator that keeps its blocks
    real_first: int = 0
    run: int = 0
    borrowed: int = 0
    borrowed_seconds: dict[str, float] = field(default_factory=dict)
    _phase_seconds: list[dict[str, float]] = field(default_factory=list)  # of each generation
    _first: Any = None

    def turn(self, generate: Callable[[], Any]) -> Any:
        """Run or reuse one generation."""
        if self.source is not None and self.run >= self.real_first:
            self.borrowed += 1
            for phase, seconds in self.source.seconds.items():
                before = self.borrowed_seconds.get(phase, 0.0)
                self.borrowed_seconds[phase] = before + seconds
            return self.source.answer
        before = self.recorder.seconds()
        answer = generate()
        after = self.recorder.seconds()
        spent = {phase: after[phase] - before[phase] for phase in REUSED_PHASES}
        self._phase_seconds.append(spent)
        if self.run == 0:
            self._first = answer
        self.run += 1
        return answer

    def cacheable(self, phase_peak_bytes: Mapping[str, int]) -> CachedRollout | None:
        """Return the rollout for later candidates; None after too few generations to time it."""
        if self.source is not None or len(self._phase_seconds) < 2:
            return None
        seconds = {}
        peak_bytes = {}
        timed = self._phase_seconds[1:]
        for phase in REUSED_PHASES:
            seconds[phase] = statistics.median(spent[phase] for spent in timed)
            if phase in phase_peak_bytes:
                peak_bytes[phase] = phase_peak_bytes[phase]
        return CachedRollout(
            answer=self._first,
            seconds=seconds,
            peak_bytes=peak_bytes,
        )


# Drawn and varied lengths.

PATTERNS = ("short", "half", "long", "mixed")  # shorter ones first
SHORT_DIVISOR = 8  # longest length divided by that of a short completion

# Settings of transformers' own engine, whose requests share one length.
SAME_FOR_ALL = ("use_transformers_paged", "use_transformers_continuous_batching")


def can_be_drawn(settings: Settings) -> bool:
    """Return True if each completion can have its own length. A server takes one for all."""
    if settings.get("use_vllm"):
        return settings.get("vllm_mode") != "server"
    return not any(settings.get(name) for name in SAME_FOR_ALL)


class LengthDraws:
    """Lengths of one generation after the other: evenly spaced quantiles in random order.

    Equal prompts get equal lengths: candidates with the same batch are compared on the same draw,
    and the ranks of one engine, which generate together, agree.
    """

    def __init__(self, sample: Sequence[int], seed: int) -> None:
        self._sample, self._seed = sorted(sample), seed
        self._generations = 0

    def take(self, prompts: Sequence[Any]) -> list[int]:
        """Return a length for each prompt of the next generation."""
        self._generations += 1
        seed_text = repr([self._seed, self._generations, *prompts])
        draw_seed = zlib.crc32(seed_text.encode())
        draw = random.Random(draw_seed)
        last = len(self._sample) - 1
        lengths = []
        for place in range(len(prompts)):
            quantile = (place + draw.random()) / len(prompts)
            index = int(quantile * len(self._sample))
            lengths.append(self._sample[min(index, last)])
        draw.shuffle(lengths)
        return lengths


class VariedLengths:
    """Lengths of one generation after the other, in the order of PATTERNS."""

    def __init__(self, longest: int) -> None:
        self._short = max(1, longest // SHORT_DIVISOR)
        self._half = max(1, longest // 2)
        self._longest = longest
        self.generations = 0

    def take(self, prompts: Sequence[Any]) -> list[int]:
        """Return a length for each prompt of the next generation."""
        pattern = PATTERNS[self.generations % len(PATTERNS)]
        self.generations += 1
        lengths_by_pattern = {
            "short": [self._short],
            "half": [self._half],
            "long": [self._longest],
            "mixed": [self._longest, self._short, self._half],
        }
        lengths = itertools.cycle(lengths_by_pattern[pattern])
        return list(itertools.islice(lengths, len(prompts)))


Draws = LengthDraws | VariedLengths


@contextmanager
def ending_at(
    draws: Draws | None,
    trainer: Any,
    model: Any,
) -> Iterator[None]:
    """Make the trainer's engine, or its own model, end completions at drawn lengths."""
    from ..tracing.patching import attribute

    if draws is None:
        yield
        return
    generation = getattr(trainer, "vllm_generation", None)
    engine = getattr(generation, "llm", None)
    engine = engine or getattr(trainer, "llm", None)
    with ExitStack() as stack:
        stack.enter_context(attribute(model, "generate", _by_model(draws, model.generate)))
        if engine is not None:
            generate = _by_engine(draws, engine.generate)
            stack.enter_context(attribute(engine, "generate", generate))
        yield


Generate = Callable[..., Any]


def _by_engine(draws: Draws, generate: Generate) -> Generate:
    """Return vLLM's `generate` with a drawn length for each prompt."""

    def engine_generate(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        parameters = []
        for length in draws.take([_tokens(prompt) for prompt in prompts]):
            drawn = sampling_params.clone()
            drawn.min_tokens = drawn.max_tokens = length
            parameters.append(drawn)
        return generate(prompts, sampling_params=parameters, **options)

    return engine_generate


def _by_model(draws: Draws, generate: Generate) -> Generate:
    """Return transformers' `generate` with a drawn length for each row."""

    def model_generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        end_ids = _end_ids(generation_config)
        if not end_ids:
            raise ValueError(
                "completions of drawn lengths need an end token, and this tokenizer has none."
            )
        given_processors = kwargs.pop("logits_processor", None) or ()
        processors = list(given_processors)
        processors.append(
            _EndAt(
                draws.take(ids.tolist()),
                end_ids,
                prompt=ids.shape[1],
                longest=generation_config.max_new_tokens,
            )
        )
        return generate(
            *args, generation_config=generation_config, logits_processor=processors, **kwargs
        )

    return model_generate


def _end_ids(generation_config: Any) -> list[int]:
    """Return the ids of the tokens that end a completion."""
    ids = generation_config.eos_token_id
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [int(ids)]


def _tokens(prompt: Any) -> Any:
    """Return the tokens of a prompt; its images have no text of their own."""
    if not isinstance(prompt, Mapping):
        return prompt
    return prompt.get("prompt_token_ids", prompt.get("prompt"))


class _EndAt:
    """Logits processor: row i emits the end token as its token number lengths[i].

    A row of the longest length never emits one, as one that is cut off there.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        end_ids: Sequence[int],
        *,
        prompt: int,
        longest: int,
    ) -> None:
        self._end_ids, self._prompt = list(end_ids), prompt
        self._rows: dict[int, list[int]] = {}  # rows that end, by their length
        for row, length in enumerate(lengths):
            if length < longest:
                rows = self._rows.setdefault(length, [])
                rows.append(row)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, self._end_ids] = -float("inf")
        length = input_ids.shape[1] - self._prompt + 1
        rows = self._rows.get(length)
        if rows:
            scores[rows] = -float("inf")
            scores[rows, self._end_ids[0]] = 0.0
        return scores
