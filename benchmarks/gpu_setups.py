"""Setups of `make bench-gpu`: models, limits, and the ladders measured on them. Data, no code that
runs anything.

A setup is the part that stays loaded: a model, its tuning, a memory limit, an engine or none. A
ladder raises the micro-batch from the safe end at one length and one choice of checkpointing, and
ends at its first out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

GLOBAL_BATCH = 64
MICRO_BATCHES = (1, 4, 16, 64)
GENERATIONS = 8
WHOLE, HALF, THIRD, FIFTH = "100%", "50%", "30%", "20%"
"""Memory limits as shares of the card. On one of 80 GB, of which drivers report less, they emulate
cards of 40, 24 and 16 GB.
"""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Climb."""

    prompt: int
    completion: int
    checkpointing: bool
    micro_batches: tuple[int, ...] = MICRO_BATCHES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Part that is loaded once, and the ladders on it."""

    model: str
    tuning: str
    limit: str
    ladders: tuple[Ladder, ...]
    holds: tuple[str, ...] = ("use_vllm=false",)
    global_batch: int = GLOBAL_BATCH
    generations: int = GENERATIONS

    @property
    def name(self) -> str:
        return " ".join([self.model.rsplit("/", 1)[-1], self.tuning, self.limit, *self.holds])


def ladders(
    lengths: Sequence[tuple[int, int]], micro_batches: tuple[int, ...] = MICRO_BATCHES
) -> tuple[Ladder, ...]:
    """Return every length with and without checkpointing, the short ones first."""
    return tuple(
        Ladder(
            prompt=prompt,
            completion=completion,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
        )
        for prompt, completion in lengths
        for checkpointing in (True, False)
    )


SHORT, LONG, WITH_ENGINE = (256, 256), (512, 512), (512, 1024)
"""Prompt and completion. Generation by transformers takes some 25 ms a token whatever the model:
hence 512 at most there.
"""


def _generating_itself(
    model: str,
    tuning: str,
    limit: str,
    *lengths: tuple[int, int],
) -> Setup:
    return Setup(
        model=model,
        tuning=tuning,
        limit=limit,
        ladders=ladders(lengths),
    )


TRANSFORMERS: tuple[Setup, ...] = tuple(
    starmap(
        _generating_itself,
        (
            ("Qwen2.5-0.5B", "lora", FIFTH, SHORT, LONG),
            ("Qwen2.5-7B", "lora", THIRD, SHORT, LONG),
            ("Qwen2.5-7B", "full", WHOLE, SHORT),
            ("Qwen2.5-1.5B", "full", THIRD, SHORT, LONG),
            ("Qwen2.5-7B", "lora", HALF, SHORT, LONG),
            ("Qwen2.5-0.5B", "full", FIFTH, SHORT, LONG),
            ("Qwen2.5-1.5B", "lora", FIFTH, SHORT, LONG),
            ("Qwen2.5-1.5B", "full", HALF, SHORT, LONG),
            ("Qwen2.5-7B", "lora", WHOLE, SHORT, LONG),
            ("Qwen2.5-0.5B", "full", HALF, SHORT, LONG),
        ),
    )
)
"""Setups by information content: a time limit may end anywhere."""

VLLM = ("use_vllm=true", "vllm_max_model_length=2048")


def _with_engine(
    model: str,
    tuning: str,
    limit: str,
    share: float,
    sleep: bool,
) -> Setup:
    holds = (
        *VLLM,
        f"vllm_gpu_memory_utilization={share}",
        f"vllm_enable_sleep_mode={str(sleep).lower()}",
    )
    return Setup(
        model=model,
        tuning=tuning,
        limit=limit,
        ladders=ladders([WITH_ENGINE], (2, 8, 32, 64)),
        holds=holds,
    )


COLOCATED: tuple[Setup, ...] = tuple(
    _with_engine(model, tuning, limit, share, sleep)
    for model, tuning, limit, share in (
        ("Qwen2.5-7B", "lora", WHOLE, 0.4),
        ("Qwen2.5-1.5B", "full", HALF, 0.3),
        ("Qwen2.5-0.5B", "lora", FIFTH, 0.3),
        ("Qwen2.5-7B", "lora", HALF, 0.5),
    )
    for sleep in (False, True)
)

LONGEST = (512, 1988)
"""Prompt and completion of 2,500 tokens together."""

QUANTISED: tuple[Setup, ...] = (
    Setup(
        model="Qwen2.5-7B",
        tuning="qlora",
        limit=HALF,
        ladders=ladders([LONGEST]),
    ),
    Setup(
        model="Qwen2.5-7B",
        tuning="qlora",
        limit=HALF,
        ladders=ladders([LONGEST], (2, 8, 32)),
        holds=(
            "use_vllm=true",
            "vllm_max_model_length=2500",
            "vllm_gpu_memory_utilization=0.4",
            "vllm_enable_sleep_mode=true",
        ),
    ),
)

SETUPS = {"transformers": TRANSFORMERS, "colocated": COLOCATED, "quantised": QUANTISED}


def tiny(setups: Sequence[Setup], model: str) -> Iterator[Setup]:
    """Return the setups for a synthetic model on a CPU: no sleep mode, lengths and limits of its
    size.
    """
    without_engine = {FIFTH: "560M", THIRD: "640M", HALF: "800M", WHOLE: "1G"}
    # vLLM wants half of the limit free when it starts, beside 550 MiB of imported packages.
    with_engine = {FIFTH: "1150M", THIRD: "1200M", HALF: "1300M", WHOLE: "1500M"}
    names: set[str] = set()
    for setup in setups:
        holds = tuple(_for_a_cpu(hold) for hold in setup.holds)
        small = replace(
            setup,
            model=model,
            limit=(with_engine if "use_vllm=true" in holds else without_engine)[setup.limit],
            global_batch=32,
            generations=4,
            holds=holds,
            ladders=tuple(
                replace(
                    ladder,
                    prompt=64,
                    completion=64 * (ladder.completion > SHORT[1]) + 64,
                    micro_batches=(4, 16, 32),
                )
                for ladder in setup.ladders
            ),
        )
        if small.name not in names:
            names.add(small.name)
            yield small


def _for_a_cpu(hold: str) -> str:
    name, _, value = hold.partition("=")
    smaller = {
        "vllm_enable_sleep_mode": "false",
        "vllm_max_model_length": "192",
        "vllm_gpu_memory_utilization": "0.5",
    }
    return f"{name}={smaller.get(name, value)}"
