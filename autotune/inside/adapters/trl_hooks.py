"""The real trainer, observed: where it is, what it holds, how long prompts and completions are, what enters the loss.

Nothing of the loop is replaced. A subclass steps in and out of phases around the trainer's own methods, and brings prompts to
the length that was asked for; a callback cuts the run into units and times them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .trl_settings import Lengths
from .trl_units import Course


@dataclass(kw_only=True)
class Seen:
    """What one rank saw in one run."""

    loss_tokens: int = 0
    """Completion tokens that entered the loss so far. A batch that is iterated over several times counts once."""

    prompt_tokens: int = 0
    longest_prompt: int = 0
    longest_completion: int = 0
    gradient_norm: Any = None
    """Of the first optimizer step, before clipping."""


@dataclass(kw_only=True)
class Timing:
    """The timed units of one run."""

    seconds: list[float] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    reward_seconds: float = 0.0
    cut_short: bool = False


def observed(trainer_class: Any, stage: Any, lengths: Lengths, seen: Seen) -> Any:
    """The trainer's class with phases and lengths around its own methods."""
    import torch

    class ObservedTrainer(trainer_class):  # type: ignore[misc]
        def _tokenize_prompts(self, *args: Any, **kwargs: Any) -> Any:
            ids, *rest = super()._tokenize_prompts(*args, **kwargs)
            return ([fit(list(one), lengths) for one in ids], *rest)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with stage.inside("rollout"):
                return super()._generate(*args, **kwargs)

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
            _count(batch, seen)
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


def _count(batch: Mapping[str, Any], seen: Seen) -> None:
    completions, prompts = batch["completion_mask"], batch["prompt_mask"]
    in_loss = completions if "tool_mask" not in batch else completions * batch["tool_mask"]
    seen.loss_tokens += int(in_loss.sum())
    seen.prompt_tokens += int(prompts.sum())
    seen.longest_prompt = max(seen.longest_prompt, int(prompts.sum(1).max()))
    seen.longest_completion = max(seen.longest_completion, int(completions.sum(1).max()))


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
        engine.sync_weights = _inside(stage, "sync", engine.sync_weights)


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


def watcher(
    callback_class: Any,
    stage: Any,
    seen: Seen,
    course: Course,
    *,
    enough_steps: int,
    stop_below: float | None,
    reward_seconds: Callable[[], float],
    over_ranks: Callable[[float, int], tuple[float, int]],
) -> tuple[Any, Timing]:
    """The callback that times units, and the timing that it fills."""
    timing = Timing()

    class Watcher(callback_class):  # type: ignore[misc]
        steps = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._begin()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            stage.enter("optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            stage.leave()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            if self.steps % course.unit.optimizer_steps == 0:
                self._end(control)
                self._begin()

        def _begin(self) -> None:
            self.at_begin = (stage.seconds(), seen.loss_tokens, seen.prompt_tokens, reward_seconds())
            self.since = time.perf_counter()

        def _end(self, control: Any) -> None:
            phases = stage.seconds()  # waits for the device
            took = time.perf_counter() - self.since
            before, loss_tokens, prompt_tokens, rewarded = self.at_begin
            tokens = seen.loss_tokens - loss_tokens
            unit = self.steps // course.unit.optimizer_steps
            stage.emit({"event": "cycle", "done": unit, "of": course.units, "seconds": took, "tokens": tokens})
            if unit <= course.warmup:
                return
            timing.seconds.append(took)
            timing.loss_tokens.append(tokens)
            timing.prompt_tokens += seen.prompt_tokens - prompt_tokens
            timing.reward_seconds += reward_seconds() - rewarded
            for phase, seconds in phases.items():
                timing.phase_seconds[phase] = timing.phase_seconds.get(phase, 0.0) + seconds - before[phase]
            if unit < course.units and self.steps >= enough_steps and self._is_hopeless(took, tokens):
                timing.cut_short = control.should_training_stop = True

        best = 0.0

        def _is_hopeless(self, seconds: float, tokens: int) -> bool:
            """Even the fastest unit so far is too slow. All ranks see the same figures, so all of them stop, or none."""
            if stop_below is None:
                return False
            slowest, together = over_ranks(seconds, tokens)
            self.best = max(self.best, together / slowest)
            return self.best < stop_below

    return Watcher(), timing
