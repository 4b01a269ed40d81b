"""The real trainer, observed: where it is, what it holds, how long prompts and completions are, what enters the loss.

Nothing of the loop is replaced. A subclass steps in and out of phases around the trainer's own methods, and brings prompts to
the length that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .trl_rollouts import Rollouts
from .trl_settings import Lengths


@dataclass(kw_only=True)
class Seen:
    """What one rank saw in one run."""

    loss_tokens: int = 0
    """Completion tokens that entered the loss so far. A batch that is iterated over several times counts once."""

    prompt_tokens: int = 0
    shortest_prompt: int | None = None
    longest_prompt: int = 0
    shortest_completion: int | None = None
    longest_completion: int = 0
    weight_syncs: int | None = None
    sleeps: int | None = None
    wakes: int | None = None
    checkpoint_saves: int = 0
    evaluations: int | None = None
    """Of these four, None where the run has no such thing."""

    gradient_norm: Any = None
    """Of the first optimizer step, before clipping."""


def observed(trainer_class: Any, stage: Any, lengths: Lengths, seen: Seen, rollouts: Rollouts) -> Any:
    """The trainer's class with phases and lengths around its own methods."""
    import torch

    class ObservedTrainer(trainer_class):  # type: ignore[misc]
        def _tokenize_prompts(self, *args: Any, **kwargs: Any) -> Any:
            ids, *rest = super()._tokenize_prompts(*args, **kwargs)
            return ([fit(list(one), lengths) for one in ids], *rest)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("rollout"):
                return super()._generate(*args, **kwargs)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            if not self.model.training:  # an evaluation
                return super()._generate_single_turn(*args, **kwargs)
            return rollouts.turn(lambda: super(ObservedTrainer, self)._generate_single_turn(*args, **kwargs))

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("reward"):
                return super()._calculate_rewards(*args, **kwargs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            with stage.inside("score"):
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("forward"):
                return super().compute_loss(*args, **kwargs)

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            batch = super()._generate_and_score_completions(*args, **kwargs)
            if self.model.training:
                count(batch, seen)
            return batch

    ObservedTrainer.__name__ = trainer_class.__name__
    return ObservedTrainer


def fit(ids: list[int], lengths: Lengths) -> list[int]:
    """Exactly the asked length, or at most that. The end stays, where the chat template hands over to the model.

    The fill is the prompt's own tokens, over and over: prompts that differ go on to differ, so an engine's prefix cache finds
    nothing to share that it would not find in earnest.
    """
    if lengths.prompt is None:
        return ids
    if lengths.pad_prompts and ids and len(ids) < lengths.prompt:
        ids = ids * -(-lengths.prompt // len(ids))
    return ids[-lengths.prompt :]


def count(batch: Mapping[str, Any], seen: Seen) -> None:
    completions, prompts = batch["completion_mask"], batch["prompt_mask"]
    in_loss = completions if "tool_mask" not in batch else completions * batch["tool_mask"]
    seen.loss_tokens += int(in_loss.sum())
    seen.prompt_tokens += int(prompts.sum())
    rows, made = prompts.sum(1), completions.sum(1)
    seen.longest_prompt = max(seen.longest_prompt, int(rows.max()))
    seen.longest_completion = max(seen.longest_completion, int(made.max()))
    seen.shortest_prompt = _least(seen.shortest_prompt, int(rows.min()))
    seen.shortest_completion = _least(seen.shortest_completion, int(made.min()))


def _least(before: int | None, now: int) -> int:
    return now if before is None else min(before, now)


def observe(trainer: Any, stage: Any, seen: Seen) -> None:
    """Phases that are other objects' methods."""
    accelerator = trainer.accelerator
    accelerator.backward = _inside(stage, "backward", accelerator.backward)
    clip = _inside(stage, "optimizer", accelerator.clip_grad_norm_)

    def clip_and_remember(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        if seen.gradient_norm is None:
            seen.gradient_norm = norm
        return norm

    accelerator.clip_grad_norm_ = clip_and_remember
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None:
        sync = _inside(stage, "sync", engine.sync_weights)

        def sync_and_count(*args: Any, **kwargs: Any) -> Any:
            done = sync(*args, **kwargs)
            seen.weight_syncs = (seen.weight_syncs or 0) + 1
            return done

        seen.weight_syncs = 0
        engine.sync_weights = sync_and_count


@contextmanager
def counting_sleep(trainer: Any, seen: Seen) -> Iterator[None]:
    """Counts how often the engine, which outlives the trainer, is put to sleep and woken meanwhile."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is None or not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        yield
        return
    seen.sleeps = seen.wakes = 0
    sleep, wake = engine.sleep, engine.wake_up

    def sleep_and_count(*args: Any, **kwargs: Any) -> Any:
        done = sleep(*args, **kwargs)
        seen.sleeps = (seen.sleeps or 0) + 1
        return done

    def wake_and_count(tags: Any = None, **kwargs: Any) -> Any:
        done = wake(tags, **kwargs)
        seen.wakes = (seen.wakes or 0) + int(tags is None or "kv_cache" in tags)
        return done

    engine.sleep, engine.wake_up = sleep_and_count, wake_and_count
    try:
        yield
    finally:
        del engine.sleep, engine.wake_up


def _inside(stage: Any, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with stage.inside(phase):
            return method(*args, **kwargs)

    return within


def foresee(model: Any, layers: list[Any], stage: Any, lengths: Lengths) -> None:
    """Tell the trend watch of work whose end is known: a generation's tokens, a forward pass's layers."""
    tokens = _Counter(stage, "rollout", lengths.completion, "token")
    if _grows_evenly(model.config):
        model.register_forward_pre_hook(tokens)
    kept = _Counter(stage, "forward", len(layers), "layer")
    for layer in layers:
        layer.register_forward_hook(kept)


def _grows_evenly(config: Any) -> bool:
    """Whether every layer's cache grows with every token; a sliding window stops growing, and would be foretold too large."""
    kinds = getattr(config, "layer_types", None)
    return not kinds or set(kinds) == {"full_attention"}


class _Counter:
    """Counts calls of hooked modules while one phase runs; a new stay in the phase counts from nothing."""

    def __init__(self, stage: Any, phase: str, total: int, what: str) -> None:
        self._stage, self._phase, self._total, self._what = stage, phase, total, what
        self._stay: int | None = None
        self._done = 0

    def __call__(self, *_: Any) -> None:
        if self._stage.phase != self._phase:
            return
        if self._stage.stay != self._stay:
            self._stay, self._done = self._stage.stay, 0
        self._done += 1
        self._stage.progress(self._done, self._total, self._what)
