"""torch's DDP: all weights on every rank, gradients averaged in buckets."""

from __future__ import annotations

from autotune.core.trace import ModuleUse, Trace
from autotune.estimate.sharding.rewriter import Rewriter
from autotune.estimate.sharding.sharding_options import Sharding

FIRST_BUCKET_BYTES = 1 << 20
BROADCAST_BYTES = 250 << 20
"""Bytes of one initial broadcast; two are in flight (torch/nn/parallel/distributed.py)."""


class Ddp(Rewriter):
    """Gradients are copied into buckets, or are views of them."""

    replaces_optimizer = False

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding

    def loaded(self) -> None:
        sent = sum(parameter.size for parameter in self.usage.parameters)
        for start in range(0, sent, 2 * BROADCAST_BYTES):
            self.book.passing(min(sent - start, 2 * BROADCAST_BYTES), "communication")
        for size in self._buckets():
            self.book.allocate(size, "communication")

    def _buckets(self) -> list[int]:
        """Return bucket sizes in the order of the gradients; a bucket is closed at its cap."""
        sizes, filled, cap = [], 0, FIRST_BUCKET_BYTES
        for parameter in reversed([each for each in self.usage.parameters if each.trains]):
            filled += parameter.size
            if filled >= cap:
                sizes.append(filled)
                filled, cap = 0, self.sharding.bucket_cap_bytes
        return [*sizes, filled] if filled else sizes

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        if self.sharding.gradient_as_bucket_view:
            self.give_up(number)
