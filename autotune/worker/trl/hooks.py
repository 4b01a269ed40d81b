"""Hooks around a real trainer: phases, lengths, and tokens in the loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from .trainer_settings import ForcedLengths

# Replacement of a trainer's method: hook(trainer, original, *args, **kwargs), with `original`
# bound.
Hook = Callable[..., Any]


@dataclass(kw_only=True)
class LoopCounts:
    """Counts of one rank in one run."""

    loss_tokens: int = (
        0  # completion tokens in the loss so far. A batch with several iterations counts once
    )
    prompt_tokens: int = 0
    shortest_prompt: int | None = None
    longest_prompt: int = 0
    shortest_completion: int | None = None
    longest_completion: int = 0
    weight_syncs: int | None = None
    sleeps: int | None = None
    wakes: int | None = None
    checkpoint_saves: int = 0
    evaluations: int | None = None  # none, like the counts above, for runs without such events
    gradient_norm: Any = None  # norm at the first optimizer step, before clipping

    def add_lengths(self, prompts: list[int], completions: list[int]) -> None:
        self.longest_prompt = max(self.longest_prompt, *prompts)
        self.shortest_prompt = min(
            [*prompts, *([] if self.shortest_prompt is None else [self.shortest_prompt])]
        )
        if completions:
            self.longest_completion = max(self.longest_completion, *completions)
            before = [] if self.shortest_completion is None else [self.shortest_completion]
            self.shortest_completion = min([*completions, *before])

    def count(self, name: str, by: int = 1) -> None:
        setattr(self, name, (getattr(self, name) or 0) + by)

    def add_batch(self, batch: Mapping[str, Any]) -> None:
        """Count a batch of prompts and completions by their masks."""
        completions, prompts = batch["completion_mask"], batch["prompt_mask"]
        in_loss = completions if "tool_mask" not in batch else completions * batch["tool_mask"]
        self.loss_tokens += int(in_loss.sum())
        self.prompt_tokens += int(prompts.sum())
        self.add_lengths(prompts.sum(1).tolist(), completions.sum(1).tolist())

    def add_rows(self, inputs: Mapping[str, Any]) -> None:
        """Count a micro-batch of given rows: tokens in the loss, other tokens, lengths."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if "completion_mask" in inputs:
            in_loss = inputs["completion_mask"]
        else:  # labels are shifted by one: a row's first token is never predicted. A reward model scores the whole row
            in_loss = (
                inputs["labels"][:, 1:] != -100 if "labels" in inputs else inputs["attention_mask"]
            )
        tokens = int(in_loss.sum())
        self.loss_tokens += tokens
        self.prompt_tokens += max(0, int(ids.numel() if mask is None else mask.sum()) - tokens)
        if (
            mask is None and inputs.get("position_ids") is not None
        ):  # flattened: average length of its rows
            lengths = [ids.numel() // max(1, int((inputs["position_ids"] == 0).sum()))]
        else:
            lengths = mask.sum(1).tolist() if mask is not None else [ids.shape[1]]
        self.add_lengths(lengths, [])


def observed(trainer_class: Any, hooks: Mapping[str, Hook]) -> Any:
    """Return a subclass whose methods run through `hooks`, under the name of the original class."""

    def method(name: str, hook: Hook) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return hook(self, getattr(super(made, self), name), *args, **kwargs)

        return call

    made = type(
        trainer_class.__name__,
        (trainer_class,),
        {name: method(name, hook) for name, hook in hooks.items()},
    )
    return made


def in_phase(recorder: Any, phase: str) -> Hook:
    return lambda _, original, *args, **kwargs: within(recorder, phase, original)(*args, **kwargs)


def scoring(recorder: Any) -> Hook:
    """Hook of a pass that is phase `score` without gradients, else of the current phase."""

    def hook(_: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch

        with nullcontext() if torch.is_grad_enabled() else recorder.inside("score"):
            return original(*args, **kwargs)

    return hook


def within(recorder: Any, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, run in a phase."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with recorder.inside(phase):
            return method(*args, **kwargs)

    return inside


def fit(ids: list[int], lengths: ForcedLengths) -> list[int]:
    """Return a prompt of exactly the forced or drawn length, or of at most that.

    The end stays: there the chat template starts the model's turn. The padding repeats the prompt's
    own tokens, so different prompts stay different and an engine's prefix cache finds no additional
    hits.
    """
    longest = lengths.prompt
    if lengths.drawn_prompts:  # by its tokens: a group has one prompt, and so one length
        longest = lengths.drawn_prompts[zlib.crc32(repr(ids).encode()) % len(lengths.drawn_prompts)]
    if longest is None:
        return ids
    if lengths.pad_prompts and ids and len(ids) < longest:
        ids = ids * -(-longest // len(ids))
    return ids[-longest:]


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Replace a method: `before(*args)`, then the original, then `after(result, *args)`."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def observe(trainer: Any, recorder: Any, seen: LoopCounts) -> None:
    """Hook the phases that are methods of other objects: accelerator and engine."""
    accelerator = trainer.accelerator

    def first_norm(norm: Any, *_: Any, **__: Any) -> None:
        if seen.gradient_norm is None:
            seen.gradient_norm = norm

    accelerator.backward = within(recorder, "backward", accelerator.backward)
    accelerator.clip_grad_norm_ = within(recorder, "optimizer", accelerator.clip_grad_norm_)
    wrap(accelerator, "clip_grad_norm_", after=first_norm)
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None:
        seen.weight_syncs = 0
        engine.sync_weights = within(recorder, "sync", engine.sync_weights)
        wrap(engine, "sync_weights", after=lambda *_, **__: seen.count("weight_syncs"))


@contextmanager
def counting_sleep(trainer: Any, seen: LoopCounts) -> Iterator[None]:
    """Count how often the engine is put to sleep and woken. The engine outlives the trainer."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is None or not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        yield
        return
    seen.sleeps = seen.wakes = 0
    wrap(engine, "sleep", after=lambda *_, **__: seen.count("sleeps"))
    wrap(
        engine,
        "wake_up",
        after=lambda _, tags=None, **__: seen.count(
            "wakes", int(tags is None or "kv_cache" in tags)
        ),
    )
    try:
        yield
    finally:
        del engine.sleep, engine.wake_up


def watch_progress(model: Any, layers: list[Any], recorder: Any, lengths: ForcedLengths) -> None:
    """Report progress of work with a known end: tokens generated, layers passed."""
    kinds = getattr(model.config, "layer_types", None)
    # The cache of a sliding window stops growing, so an extrapolation would be too large.
    if not kinds or set(kinds) == {"full_attention"}:
        model.register_forward_pre_hook(
            _ProgressCounter(recorder, "rollout", lengths.completion, "token")
        )
    counter = _ProgressCounter(recorder, "forward", len(layers), "layer")
    for layer in layers:
        layer.register_forward_hook(counter)


class _ProgressCounter:
    """Counts calls of hooked modules during one phase, from zero each time the phase is entered."""

    def __init__(self, recorder: Any, phase: str, total: int, what: str) -> None:
        self._recorder, self._phase, self._total, self._what = recorder, phase, total, what
        self._entered: int | None = None
        self._done = 0

    def __call__(self, *_: Any) -> None:
        if self._recorder.phase != self._phase:
            return
        if self._recorder.phase_changes != self._entered:
            self._entered, self._done = self._recorder.phase_changes, 0
        self._done += 1
        self._recorder.progress(self._done, self._total, self._what)
