"""Points of `make first-light`: models, limits, and the settings that are measured on them. Data,
no code that runs anything.

A setup is the part that stays loaded: a method, a model, its tuning, a memory limit, an engine or
none. Its points follow in the order of their memory. An out-of-memory error ends only the points
with the same choice of checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

GENERATIONS = 8
TINY_LIMIT_GIB = 0.55


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement. `completion` is 0 for rows that are not generated."""

    micro_batch: int
    checkpointing: bool
    prompt: int
    completion: int = 0

    @property
    def name(self) -> str:
        lengths = f"{self.prompt} + {self.completion}" if self.completion else f"{self.prompt}"
        checkpointing = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"micro-batch {self.micro_batch}, {lengths} tokens, {checkpointing}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Part that is loaded once, and its points."""

    method: str
    model: str
    tuning: str
    limit_gib: float | None  # None: the whole card
    points: tuple[Point, ...]
    holds: tuple[str, ...] = ()
    global_batch: int

    @property
    def name(self) -> str:
        limit = "whole card" if self.limit_gib is None else f"{self.limit_gib:g} GiB"
        model = self.model.rsplit("/", 1)[-1]
        parts = [self.method, model, self.tuning, limit]
        for hold in self.holds:
            if hold.startswith(("use_vllm=true", "vllm_gpu", "vllm_enable")):
                parts.append(hold)
        return " ".join(parts)


Shape = tuple[int, bool]
"""Micro-batch and checkpointing."""


def _rows(
    model: str,
    tuning: str,
    limit_gib: float | None,
    length: int,
    *shapes: Shape,
) -> Setup:
    """Rows of one length: no rollout, so that a point takes seconds."""
    points = []
    for micro_batch, checkpointing in shapes:
        points.append(
            Point(
                micro_batch=micro_batch,
                checkpointing=checkpointing,
                prompt=length,
            )
        )
    return Setup(
        method="sft",
        model=model,
        tuning=tuning,
        limit_gib=limit_gib,
        points=tuple(points),
        global_batch=8 if "7B" in model else 16,
    )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """vLLM in the training process."""

    share: float
    sleep: bool

    def holds(self, longest: int) -> tuple[str, ...]:
        return (
            "use_vllm=true",
            f"vllm_max_model_length={longest}",
            f"vllm_gpu_memory_utilization={self.share}",
            f"vllm_enable_sleep_mode={str(self.sleep).lower()}",
        )


def _rollouts(
    model: str,
    tuning: str,
    limit_gib: float | None,
    lengths: tuple[int, int],
    *shapes: Shape,
    engine: Engine | None = None,
) -> Setup:
    """GRPO: completions by transformers, or by an engine."""
    prompt, completion = lengths
    points = []
    for micro_batch, checkpointing in shapes:
        points.append(
            Point(
                micro_batch=micro_batch,
                checkpointing=checkpointing,
                prompt=prompt,
                completion=completion,
            )
        )
    engine_holds = engine.holds(sum(lengths)) if engine else ("use_vllm=false",)
    return Setup(
        method="grpo",
        model=model,
        tuning=tuning,
        limit_gib=limit_gib,
        points=tuple(points),
        holds=(f"num_generations={GENERATIONS}", *engine_holds),
        global_batch=64 if engine else 32,
    )


SFT = (
    _rows(
        "Qwen2.5-7B",
        "lora",
        40,
        2048,
        (1, True),
        (8, True),
        (1, False),
        (2, False),
        (8, False),
    ),
    _rows(
        "Qwen2.5-0.5B",
        "lora",
        16,
        1024,
        (4, True),
        (16, True),
        (4, False),
        (8, False),
    ),
    _rows(
        "Qwen2.5-7B",
        "full",
        None,
        2048,
        (1, True),
        (4, True),
        (4, False),
    ),
    _rows(
        "Qwen2.5-1.5B",
        "full",
        24,
        1024,
        (4, True),
        (2, False),
        (4, False),
    ),
)
COLOCATED = (
    _rollouts(
        "Qwen2.5-7B",
        "lora",
        None,
        (512, 512),
        (4, True),
        (16, True),
        engine=Engine(share=0.5, sleep=True),
    ),
    _rollouts(
        "Qwen2.5-0.5B",
        "lora",
        16,
        (256, 256),
        (8, True),
        engine=Engine(share=0.3, sleep=True),
    ),
    _rollouts(
        "Qwen2.5-1.5B",
        "full",
        40,
        (512, 512),
        (4, True),
        (8, False),
        engine=Engine(share=0.3, sleep=False),
    ),
)
# The share is of the limit, not of the card: the engine has half of 24 GiB and half of 40 GiB.
SHARES = tuple(
    _rollouts(
        "Qwen2.5-0.5B",
        "lora",
        limit_gib,
        (256, 256),
        (8, True),
        engine=Engine(share=0.5, sleep=True),
    )
    for limit_gib in (16, 24, 40, None)
)
ROLLOUTS = (
    _rollouts(
        "Qwen2.5-0.5B",
        "lora",
        16,
        (256, 128),
        (4, True),
        (16, True),
        (16, False),
    ),
    _rollouts(
        "Qwen2.5-7B",
        "lora",
        40,
        (256, 128),
        (4, True),
        (16, False),
    ),
)
QUANTISED = (
    _rollouts(
        "Qwen2.5-7B",
        "qlora",
        24,
        (512, 512),
        (4, True),
        (16, True),
        (16, False),
    ),
)

PARTS = {
    "sft": SFT,
    "colocated": COLOCATED,
    "shares": SHARES,
    "rollouts": ROLLOUTS,
    "quantised": QUANTISED,
}


def tiny(model: str) -> tuple[Setup, ...]:
    """Return two setups for a synthetic model on a CPU. The second one runs out of memory: packages
    alone take most of its limit.
    """
    setup = replace(
        _rollouts(model, "full", None, (64, 128), (4, False), (32, False)),
        global_batch=32,
        holds=("num_generations=4", "use_vllm=false"),
    )
    return (setup, replace(setup, limit_gib=TINY_LIMIT_GIB))


def all_setups() -> Iterator[Setup]:
    for setups in PARTS.values():
        yield from setups
