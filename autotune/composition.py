"""Composition: which models are resident during training, where, sharded how, and awake when.

Trainers make it from a candidate; prediction consumes it, and knows of no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.measurement import Phase

Role = Literal["policy", "reference", "critic", "reward", "engine"]
Sharding = Literal["none", "optimizer", "gradients", "parameters", "tensor"]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """One model that holds memory."""

    role: Role
    model: str
    """The model's name; a reward that is a plain function is no resident."""

    ranks: tuple[int, ...]
    """The ranks that hold it, or a part of it."""

    dtype: str
    """Precision of its weights."""

    trains: bool
    """Whether it has gradients and optimizer state: an adapter's count as its model's."""

    adapter_rank: int | None = None
    """Rank of the LoRA adapter that is trained in its place; None under full tuning, and for frozen models."""

    quantised_bits: int | None = None
    """Bits per weight where the weights are quantised."""

    sharding: Sharding = "none"
    """How it is spread over its ranks: `none` is a copy on each; `tensor` splits each layer."""

    shares_weights_with: Role | None = None
    """The resident whose weights it uses, so that they count once: a reference that is the policy with its adapter off."""

    claims_share: float | None = None
    """Share of the device that it claims up front: an engine's."""

    awake: tuple[Phase, ...] | None = None
    """The phases in which it holds its memory; None is always."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Everything resident, and the shape of the step that runs over it."""

    residents: tuple[Resident, ...]
    ranks: int
    micro_batch: int
    """Completions per rank in one forward and backward pass."""

    accumulation: int
    """Micro-steps per optimizer step."""

    generation_batch: int
    """Completions that are generated together, over all ranks."""

    prompt_length: int
    completion_length: int
    checkpointing: bool
    """Whether activations are recomputed in the backward pass."""

    optimizer: str

    def __getitem__(self, role: Role) -> Resident:
        return next(resident for resident in self.residents if resident.role == role)

    def __contains__(self, role: object) -> bool:
        return any(resident.role == role for resident in self.residents)
