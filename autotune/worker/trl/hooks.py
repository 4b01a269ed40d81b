"""Hooks around a real trainer: phases, lengths, and tokens in the loss."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .trainer_settings import ForcedLengths

Method = Callable[..., Any]

Hook = Callable[..., Any]
"""Replacement of a trainer's method: hook(trainer, original, *args, **kwargs), with `original`
bound.
"""

NOT_IN_LOSS = -100
"""Label of a token that is not learned from."""


# What is counted.


@dataclass(kw_only=True)
class LoopCounts:
    """Counts of one rank in one run."""

    loss_tokens: int = 0  # completion tokens in the loss. A batch with several iterations is one
    prompt_tokens: int = 0
    shortest_prompt: int | None = None
    longest_prompt: int = 0
    shortest_completion: int | None = None
    longest_completion: int = 0
    # None for runs without such events
    weight_syncs: int | None = None
    sleeps: int | None = None
    wakes: int | None = None
    checkpoint_saves: int = 0
    evaluations: int | None = None
    gradient_norm: Any = None  # norm at the first optimizer step, before clipping

    def count(self, name: str, by: int = 1) -> None:
        before = getattr(self, name) or 0
        setattr(self, name, before + by)

    def add_lengths(self, prompts: list[int], completions: list[int]) -> None:
        self.longest_prompt = max(self.longest_prompt, *prompts)
        self.shortest_prompt = _shortest(self.shortest_prompt, prompts)
        if completions:
            self.longest_completion = max(self.longest_completion, *completions)
            self.shortest_completion = _shortest(self.shortest_completion, completions)

    def add_batch(self, batch: Mapping[str, Any]) -> None:
        """Count a batch of prompts and completions by their masks."""
        prompt_mask = batch["prompt_mask"]
        completion_mask = batch["completion_mask"]
        in_loss = completion_mask
        if "tool_mask" in batch:
            in_loss = completion_mask * batch["tool_mask"]
        self.loss_tokens += int(in_loss.sum())
        self.prompt_tokens += int(prompt_mask.sum())
        prompts = prompt_mask.sum(1)
        completions = completion_mask.sum(1)
        self.add_lengths(prompts.tolist(), completions.tolist())

    def add_rows(self, inputs: Mapping[str, Any]) -> None:
        """Count a micro-batch of given rows: tokens in the loss, other tokens, lengths."""
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        loss_tokens = int(_in_loss(inputs).sum())
        all_tokens = int(ids.numel() if mask is None else mask.sum())
        self.loss_tokens += loss_tokens
        self.prompt_tokens += max(0, all_tokens - loss_tokens)
        self.add_lengths(_row_lengths(inputs), [])


def _shortest(before: int | None, lengths: list[int]) -> int:
    return min(lengths) if before is None else min(before, *lengths)


def _in_loss(inputs: Mapping[str, Any]) -> Any:
    """Return a mask of the tokens in the loss."""
    if "completion_mask" in inputs:
        return inputs["completion_mask"]
    if "labels" in inputs:
        # Labels are shifted by one: a row's first token is never predicted.
        return inputs["labels"][:, 1:] != NOT_IN_LOSS
    return inputs["attention_mask"]  # a reward model scores the whole row


def _row_lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Return the length of each row; of rows flattened to one, only the average is known."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if mask is not None:
        return mask.sum(1).tolist()  # type: ignore[no-any-return]
    positions = inputs.get("position_ids")
    if positions is None:
        return [ids.shape[1]]
    rows = max(1, int((positions == 0).sum()))
    return [ids.numel() // rows]


# Hooks of a trainer's methods.


def observed(trainer_class: Any, hooks: Mapping[str, Hook]) -> Any:
    """Return a subclass whose methods run through `hooks`, under the name of the original class."""

    def method(name: str, hook: Hook) -> Method:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            original = getattr(super(subclass, self), name)
            return hook(self, original, *args, **kwargs)

        return call

    methods = {name: method(name, hook) for name, hook in hooks.items()}
    subclass = type(trainer_class.__name__, (trainer_class,), methods)
    return subclass


def in_phase(recorder: Any, phase: str) -> Hook:
    """Return a hook that runs the method in a phase."""

    def hook(_: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
        with recorder.inside(phase):
            return original(*args, **kwargs)

    return hook


def scoring(recorder: Any) -> Hook:
    """Return a hook of a pass that is phase `score` without gradients, else of the current one."""

    def hook(_: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.is_grad_enabled():
            return original(*args, **kwargs)
        with recorder.inside("score"):
            return original(*args, **kwargs)

    return hook


def fit(ids: list[int], lengths: ForcedLengths) -> list[int]:
    """Return a prompt of exactly the forced or drawn length, or of at most that.

    The end stays: there the chat template starts the model's turn. The padding repeats the prompt's
    own tokens, so different prompts stay different and an engine's prefix cache finds no additional
    hits.
    """
    length = lengths.prompt
    if lengths.drawn_prompts:
        # Drawn by its tokens: a group has one prompt, and so one length.
        draw = zlib.crc32(repr(ids).encode())
        length = lengths.drawn_prompts[draw % len(lengths.drawn_prompts)]
    if length is None:
        return ids
    if lengths.pad_prompts and 0 < len(ids) < length:
        ids = ids * math.ceil(length / len(ids))
    return ids[-length:]


# Hooks of other objects' methods.


def within(
    recorder: Any,
    phase: str,
    method: Method,
) -> Method:
    """Return the method, run in a phase."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with recorder.inside(phase):
            return method(*args, **kwargs)

    return inside


def call_after(
    owner: Any,
    name: str,
    then: Callable[..., None],
) -> None:
    """Replace a method: the original, then `then(result, *args)`."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def observe(
    trainer: Any,
    recorder: Any,
    counts: LoopCounts,
) -> None:
    """Hook the phases that are methods of other objects: accelerator and engine."""

    def keep_first_norm(norm: Any, *_: Any, **__: Any) -> None:
        if counts.gradient_norm is None:
            counts.gradient_norm = norm

    def count_sync(*_: Any, **__: Any) -> None:
        counts.count("weight_syncs")

    accelerator = trainer.accelerator
    accelerator.backward = within(recorder, "backward", accelerator.backward)
    accelerator.clip_grad_norm_ = within(recorder, "optimizer", accelerator.clip_grad_norm_)
    call_after(accelerator, "clip_grad_norm_", keep_first_norm)
    engine = getattr(trainer, "vllm_generation", None)
    if engine is not None:
        counts.weight_syncs = 0
        engine.sync_weights = within(recorder, "sync", engine.sync_weights)
        call_after(engine, "sync_weights", count_sync)


@contextmanager
def counting_sleep(trainer: Any, counts: LoopCounts) -> Iterator[None]:
    """Count how often the engine is put to sleep and woken. The engine outlives the trainer."""
    generation = getattr(trainer, "vllm_generation", None)
    engine = getattr(generation, "llm", None)
    if engine is None or not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        yield
        return

    def count_sleep(*_: Any, **__: Any) -> None:
        counts.count("sleeps")

    def count_wake(_: Any, tags: Any = None, **__: Any) -> None:
        # TRL wakes the weights alone for a sync; the engine is awake once it has its cache.
        wakes_cache = tags is None or "kv_cache" in tags
        counts.count("wakes", int(wakes_cache))

    counts.sleeps = counts.wakes = 0
    call_after(engine, "sleep", count_sleep)
    call_after(engine, "wake_up", count_wake)
    try:
        yield
    finally:
        del engine.sleep, engine.wake_up


# Progress.


def watch_progress(
    model: Any,
    layers: list[Any],
    recorder: Any,
    lengths: ForcedLengths,
) -> None:
    """Report progress of work with a known end: tokens generated, layers passed."""
    kinds = getattr(model.config, "layer_types", None)
    # The cache of a sliding window stops growing, so an extrapolation would be too large.
    if not kinds or set(kinds) == {"full_attention"}:
        tokens = _ProgressCounter(recorder, "rollout", lengths.completion, "token")
        model.register_forward_pre_hook(tokens)
    passed_layers = _ProgressCounter(recorder, "forward", len(layers), "layer")
    for layer in layers:
        layer.register_forward_hook(passed_layers)


class _ProgressCounter:
    """Counts calls of hooked modules during one phase, from zero each time the phase is entered."""

    def __init__(
        self,
        recorder: Any,
        phase: str,
        total: int,
        unit: str,
    ) -> None:
        self._recorder = recorder
        self._phase = phase
        self._total = total
        self._unit = unit
        self._entered: int | None = None  # the recorder's number of the entry that is counted
        self._done = 0

    def __call__(self, *_: Any) -> None:
        if self._recorder.phase != self._phase:
            return
        if self._recorder.phase_changes != self._entered:
            self._entered = self._recorder.phase_changes
            self._done = 0
        self._done += 1
        self._recorder.progress(self._done, self._total, self._unit)
