"""Rollouts of a run: those of an earlier candidate with the same batch, and completions of the
lengths that occur.

Reuse: with the same generation batch and engine, micro-batch, accumulation and checkpointing do not
affect generation. A later candidate then only trains, on completions of an earlier one, and its
result includes the seconds measured there. Reuse is reported and never part of a certificate: the
longer probe of a finalist generates.

Drawn lengths: vLLM takes the length of each prompt's completion. transformers generates the whole
batch until its longest completion ends, as in training: a logits processor makes each row emit the
end token at its length, and no earlier.
"""

from __future__ import annotations

import json
import random
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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
MAX_CACHED = 8  # generation batches in the cache; each has a few megabytes of token ids


@dataclass(frozen=True)
class CachedRollout:
    """One generation batch and its cost."""

    # what TRL's method returns: token ids, and their log-probabilities if the engine has them
    answer: Any
    seconds: Mapping[str, float]  # median over the generations after the first, by phase
    peak_bytes: Mapping[str, int]  # peak memory of the process, by phase


class RolloutCache(dict[str, CachedRollout]):
    """Latest generation batches of one rank since its load."""

    def put(self, key: str, rollout: CachedRollout) -> None:
        self.pop(key, None)
        self[key] = rollout
        while len(self) > MAX_CACHED:
            del self[next(iter(self))]


def key_of(
    settings: Mapping[str, Any],
    *,
    rows: int,
    prompt: int | None,
    completion: int,
    typical: bool,
    seed: int,
) -> str:
    """Key that is equal for equal rollouts."""
    relevant = {
        name: str(value)
        for name, value in sorted(settings.items())
        if name not in NOT_IN_GENERATION
    }
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
    _turns: list[dict[str, float]] = field(default_factory=list)
    _first: Any = None

    def turn(self, generate: Callable[[], Any]) -> Any:
        """Run or reuse one generation."""
        if self.source is not None and self.run >= self.real_first:
            self.borrowed += 1
            for phase, seconds in self.source.seconds.items():
                self.borrowed_seconds[phase] = self.borrowed_seconds.get(phase, 0.0) + seconds
            return self.source.answer
        before = self.recorder.seconds()
        answer = generate()
        after = self.recorder.seconds()
        self._turns.append({phase: after[phase] - before[phase] for phase in REUSED_PHASES})
        self._first = answer if self.run == 0 else self._first
        self.run += 1
        return answer

    def cacheable(self, phase_peak_bytes: Mapping[str, int]) -> CachedRollout | None:
        """Return the rollout for later candidates; None after too few generations to time it."""
        if self.source is not None or len(self._turns) < 2:
            return None
        return CachedRollout(
            answer=self._first,
            seconds={
                phase: statistics.median(turn[phase] for turn in self._turns[1:])
                for phase in REUSED_PHASES
            },
            peak_bytes={
                phase: phase_peak_bytes[phase]
                for phase in REUSED_PHASES
                if phase in phase_peak_bytes
            },
        )


# Settings of transformers' own engine, whose requests share one length.
SAME_FOR_ALL = ("use_transformers_paged", "use_transformers_continuous_batching")


def can_be_drawn(settings: Mapping[str, Any]) -> bool:
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
        self._sample, self._seed, self._turns = sorted(sample), seed, 0

    def take(self, prompts: Sequence[Any]) -> list[int]:
        self._turns += 1
        chance = random.Random(zlib.crc32(repr([self._seed, self._turns, *prompts]).encode()))
        count, size = len(prompts), len(self._sample)
        drawn = [
            self._sample[min(size - 1, int((place + chance.random()) / count * size))]
            for place in range(count)
        ]
        chance.shuffle(drawn)
        return drawn


@contextmanager
def ending_at(draws: LengthDraws | None, trainer: Any, model: Any) -> Iterator[None]:
    """Make the trainer's engine, or its own model, end completions at drawn lengths."""
    from ..tracing.patching import attribute

    if draws is None:
        yield
        return
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None) or getattr(
        trainer, "llm", None
    )
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
            raise ValueError(
                "completions of drawn lengths need an end token, and this tokenizer has none."
            )
        processor = _EndAt(
            draws.take(ids.tolist()),
            ends,
            prompt=ids.shape[1],
            longest=generation_config.max_new_tokens,
        )
        processors = [*(kwargs.pop("logits_processor", None) or ()), processor]
        return by_model(
            *args, generation_config=generation_config, logits_processor=processors, **kwargs
        )

    in_engine = nullcontext() if engine is None else attribute(engine, "generate", engine_generate)
    with attribute(model, "generate", model_generate), in_engine:
        yield


def _tokens(prompt: Any) -> Any:
    """Return the tokens of a prompt; its images have no text of their own."""
    return (
        prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, Mapping)
        else prompt
    )


class _EndAt:
    """Logits processor: row i emits the end token as its token number lengths[i].

    A row of the longest length never emits one, as one that is cut off there.
    """

    def __init__(
        self, lengths: Sequence[int], ends: Sequence[int], *, prompt: int, longest: int
    ) -> None:
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
