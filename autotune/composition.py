"""Composition: which models are resident during training, where, sharded how, and awake when.

Trainers make it from a candidate; prediction consumes it, and knows of no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.measurement import Phase

Role = Literal["policy", "reference", "critic", "reward", "engine"]
Sharding = Literal["none", "optimizer", "gradients", "parameters", "tensor"]
Generation = Literal["none", "trainer", "engine", "server"]
"""Who writes completions: nobody (a fixed dataset), the trainer's own model, an engine on the same devices, or one elsewhere."""


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

    weight_bytes: int | None = None
    """On each rank, where it is another model than the policy and its size is known."""

    state_bytes_per_weight: int = 8
    """Of a trained one beside the policy: Adam's two moments, and a master copy where its weights are shorter than float32.
    0 where all of that waits on the host while the policy trains."""

    turn_bytes_per_weight: int = 0
    """Of one that is trained in turns with the policy: what of its state comes from the host for its own turn alone."""

    trains_along: bool = False
    """Trained beside the policy at the same time, with activations of its own; else one after the other."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a rollout engine on the training devices is told."""

    utilization: float
    """Share of the device that it claims."""

    max_model_length: int
    """Longest sequence, prompt and completion, that it accepts."""

    max_num_seqs: int
    """Sequences that it decodes at a time."""

    tensor_parallel: int = 1
    sleep: bool = False
    """Whether it gives its memory back while it is not needed."""

    eager: bool = False
    """Without captured graphs."""

    quantised_bits: int | None = None
    max_num_batched_tokens: int | None = None
    """Tokens in one pass; None is what TRL says."""

    apart: bool = False
    """In a process of its own, which shares neither context nor torch's cache with the trainer."""

    shares_weights: bool = False
    """Its weights are the policy's own: they count once, and it starts before anything else is there."""

    wakes_whole: bool = False
    """Takes its cache back together with its weights, before these are renewed, and not after."""


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
    generation: Generation = "none"
    gathers_each_token: bool = False
    """Where the trainer writes with weights that are spread: whether they come together anew for every token, not once."""

    engine: EngineSettings | None = None
    """Set where the engine shares the training devices."""

    attention: str | None = None
    """The attention implementation that was asked for; None is the framework's own choice."""

    sharded_by: str = "none"
    """Who spreads the training state over the ranks: `none`, `ddp`, `fsdp1`, `fsdp2`, `zero1`, `zero2`, `zero3`."""

    processes: int = 1
    """That hold a context of their own on each device."""

    away_in_rollout: tuple[str, ...] = ()
    """Parts of the policy's state that wait on the host while completions are written: `weights`, `adapters`, `optimizer`."""

    spared: tuple[str, ...] = ()
    """Parts of a plain step that the framework's own kernels may keep next to nothing of: without them is the least it takes."""

    pushes_adapter: bool = False
    """Whether an adapter alone goes over to the engine: else whole weights, with what was learned merged into them."""

    pushes_in: int = 1
    """Parts, one after the other, in which whole weights go over."""

    writes_at_a_time: int | None = None
    """Completions that a rank writes together; None is all of its part of the generation batch."""

    keeps_logits_of: int = 0
    """Completions of a rank whose logits, in float32, its loop keeps from one rollout until the next one is written."""

    empties_cache: bool = False
    """Whether its loop gives torch's cache back before and after each rollout."""

    notes: tuple[str, ...] = ()
    """What the framework's step was taken for, in words for the reader."""

    def __getitem__(self, role: Role) -> Resident:
        return next(resident for resident in self.residents if resident.role == role)

    def __contains__(self, role: object) -> bool:
        return any(resident.role == role for resident in self.residents)
