"""Peak bytes of verl's fused head and of the stand-in's, as the CPU allocator counts them.
Prints JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from verl.utils.experimental.torch_functional import FusedLinearForPPO

from autotune.worker.stand_in.losses import HEADS, TOKENS
from autotune.worker.tracing.annotators import NullAnnotator

ROWS, HIDDEN, WORDS = 3 * TOKENS, 64, 8192


def peak(step: Callable[[Any, Any], Any], *, trains: bool) -> int:
    hidden = torch.randn(1, ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(WORDS, HIDDEN, dtype=torch.bfloat16, requires_grad=trains)
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        record_shapes=False,
    ) as recording:
        step(hidden, weight).sum().backward()
    sizes = list(allocations(recording.profiler.kineto_results.experimental_event_tree()))
    live = top = 0
    for size in sizes:
        live += size
        top = max(top, live)
    return top


def allocations(events: Any) -> Iterator[int]:
    """Yield sizes in the order of time; what is freed is negative."""
    memory_events, pending = [], list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            memory_events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return (size for _, size in sorted(memory_events, key=lambda entry: entry[0]))


def verl_head(hidden: Any, weight: Any) -> Any:
    return FusedLinearForPPO()(hidden, weight, torch.zeros(1, ROWS, dtype=torch.long))[0]


def stand_in(hidden: Any, weight: Any) -> Any:
    return HEADS["tokens"].apply(hidden, weight, TOKENS, NullAnnotator())


if __name__ == "__main__":
    print(
        json.dumps(
            [
                [peak(step, trains=trains) for step in (verl_head, stand_in)]
                for trains in (False, True)
            ]
        )
    )
