"""Trace of a training step without a GPU, weights or memory: every storage of the step, in order.

The installed framework's own code runs on fake tensors. A dispatch mode (`tracker`) sees every
operation and records allocations and frees. This package is independent of the framework; the
adapters (`trl/step_trace.py`, `stand_in/trace.py`) drive the steps.

A trace adapter answers the worker like any other (`warm`, `load`, `measure`, `release`): `load` has
only the imports' side effects, `measure` takes one specification and returns one trace.

The specification, as JSON (`measure`'s request):

    {"method": "grpo" | "rloo" | "sft" | "dpo" | "online-dpo" | "async-grpo" | "generic",
     "model": {"name": s, "folder": s | null, "config": {...}, "dtype": "bfloat16",
               "attn_implementation": "sdpa" | null,
               "load_in_4bit": false,        quantisation, with the libraries' own options
               "load_in_8bit": false,
               "gptq_bits": null,
               "layers": null | n},          number of layers to trace; null: all
     "adapter": {"lora_r": .., ...} | null,  as `load` has it in the TRL adapter
     "settings": {...},                      the framework's own settings, as in a probe
     "device": "cuda" | "cpu",               whose kernels, autocast rules and defaults apply
     "capability": [8, 0] | absent,          of that GPU: selects attention kernels and workspaces
     "lengths": {"prompt": P,                a batch is B x (P + C) tokens,
                 "completion": C,            a row of SFT or DPO is P + C
                 "padded": false},
     "groups": g | absent,                   prompts of a row of asynchronous GRPO
     "sharding": {"kind": "none" | "ddp" | "fsdp2" | "zero1" | "zero2" | "zero3", "ranks": w},
     "micro_steps": null | k,                micro-steps per optimizer step; null: up to 2
     "steps": 2,
     "trust_remote_code": false}

The answer, as JSON, is an `autotune.core.trace.Trace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Spec = Mapping[str, Any]
"""The specification of a trace."""

DEFAULT_CAPABILITY = (8, 0)
"""A100, unless specified: from 8.0 on torch selects the same kernels, except Hopper's cuDNN."""

_capability = DEFAULT_CAPABILITY


class Untraceable(RuntimeError):
    """The step cannot be traced; the text names the operation or module."""


def sharding_kind(spec: Spec) -> str:
    sharding = spec.get("sharding") or {}
    return str(sharding.get("kind", "none"))


def capability() -> tuple[int, int]:
    """Return the compute capability of the GPU whose choices the trace reproduces."""
    return _capability


@contextmanager
def traced_gpu(spec: Spec) -> Iterator[None]:
    """Trace for the specification's `"capability"`: [major, minor] or "major.minor"."""
    global _capability
    previous = _capability
    _capability = _requested_capability(spec)
    try:
        yield
    finally:
        _capability = previous


def _requested_capability(spec: Spec) -> tuple[int, int]:
    requested = spec.get("capability")
    if not requested:
        return DEFAULT_CAPABILITY
    if isinstance(requested, str):
        requested = requested.split(".")
    return int(requested[0]), int(requested[1])
