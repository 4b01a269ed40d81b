"""What a rank holds when the model is spread over several: a plain trace turned into the trace of one rank.

FSDP2 is traced as it is; the other kinds follow, from a plain trace, what their libraries do at each module and gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autotune.trace import Inventory, Trace

Kind = Literal["none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the model is spread, with the library's own defaults where nothing is said."""

    kind: Kind = "none"
    ranks: int = 1
    rank: int = 0
    """Whose trace it is: parts differ by what does not divide evenly."""

    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_bucket_size: int = 500_000_000
    """Elements; `deepspeed/runtime/zero/config.py`, as the other ZeRO defaults here."""

    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 1 << 62
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket_cap_bytes: int = 25 * MIB
    """DDP's; the first bucket is of 1 MiB."""

    gradients_are_bucket_views: bool = False
    reshards_after_forward: bool = True
    """FSDP1: FULL_SHARD does, SHARD_GRAD_OP does not."""

    prefetches_backward: bool = True
    master_bytes: int | None = None
    """FSDP1: bytes per element of the shards of what trains; None: as the model computes."""

    frozen_master_bytes: int | None = None
    """FSDP1: the same of what is frozen; accelerate widens what trains alone, other frameworks all."""

    ignores_trainable: bool = False
    """FSDP1: what trains is among `ignored_modules`, whole on every rank, its gradients averaged by hooks of somebody else's."""

    uses_original_parameters: bool = True
    """FSDP1: whether the optimizer sees pieces of the parameters rather than flat ones; accelerate launch's default."""

    synchronises: bool = True
    """FSDP1: whether the first rank broadcasts its weights when units are made; accelerate launch's default."""

    begins_on_meta: bool = False
    """FSDP1: whether the other ranks' parameters have no memory before, as transformers leaves them where they are quantised."""

    reduce_bytes: int | None = None
    """FSDP1: bytes per element of a gradient that is being reduced; None: as it is computed."""

    @classmethod
    def of(cls, given: Mapping[str, object] | None, *, hidden_size: int | None = None) -> Sharding:
        """From a specification's `sharding`, whose `options` have the library's names; `auto` is what transformers fills in."""
        from autotune.predict.sharding.options import read

        return cls() if given is None else read(cls(), given, hidden_size)


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One rank."""

    trace: Trace
    host_bytes: int = 0
    """What the rank keeps on the host instead."""

    notes: tuple[str, ...] = ()


def apply(trace: Trace, sharding: Sharding) -> Sharded:
    """The trace of one rank. A plain trace for kinds other than FSDP2, which has been traced sharded."""
    alone = sharding.ranks == 1 and not (sharding.kind == "fsdp1" and sharding.master_bytes)
    if sharding.kind in ("none", "fsdp2") or alone:  # FSDP1 keeps its weights apart from what it computes with on one rank, too
        return Sharded(trace=trace)
    if trace.usage is None:
        raise ValueError(
            f"{sharding.kind} hangs on when each module uses its parameters, and this trace does not say: "
            f"trace it with sharding kind {sharding.kind}"
        )
    if sharding.kind in ("zero1", "zero2"):
        from autotune.predict.sharding.zero import Zero12

        rewriter = Zero12(trace, trace.usage, sharding)
        return Sharded(trace=rewriter.rewritten(), host_bytes=rewriter.host_bytes)
    if sharding.kind == "zero3":
        from autotune.predict.sharding.zero3 import Zero3

        third = Zero3(trace, trace.usage, sharding)
        return Sharded(trace=third.rewritten(), host_bytes=third.host_bytes)
    if sharding.kind == "ddp":
        from autotune.predict.sharding.ddp import Ddp

        return Sharded(trace=Ddp(trace, trace.usage, sharding).rewritten())
    from autotune.predict.sharding.fsdp1 import Fsdp1

    return Sharded(trace=Fsdp1(trace, trace.usage, sharding).rewritten())


def worst_rank(trace: Trace, sharding: Sharding) -> Sharded:
    """Of the first and the last rank, between which the others lie. Ranks that begin on meta cache more than the first."""
    if sharding.begins_on_meta and sharding.ranks > 1:
        return apply(trace, replace(sharding, rank=sharding.ranks - 1))
    both = [apply(trace, replace(sharding, rank=rank)) for rank in sorted({0, sharding.ranks - 1})]
    return max(both, key=lambda one: one.trace.peak_bytes)


def gather_for_generation_bytes(inventory: Inventory, sharding: Sharding, *, whole: bool, bytes_per_parameter: float) -> int:
    """What one rank gathers beside its shards for the rollout: the whole model at once, or one parameter after the other."""
    if sharding.kind not in ("zero3", "fsdp1", "fsdp2") or sharding.ranks == 1:
        return 0
    if whole:
        return round(inventory.parameters * bytes_per_parameter * (sharding.ranks - 1) / sharding.ranks)
    return round(inventory.largest_parameter * bytes_per_parameter)
