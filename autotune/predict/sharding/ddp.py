"""torch's DDP: every rank has all, and gradients are averaged in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.predict.sharding.book import Rewriter
from autotune.trace import Trace, Usage

if TYPE_CHECKING:
    from autotune.predict.sharding import Sharding

FIRST_BUCKET_BYTES = 1 << 20
BROADCAST_BYTES = 250 << 20
"""What DDP sends at a time when it is made; two are under way (torch/nn/parallel/distributed.py, c10d's broadcast_coalesced)."""


class Ddp(Rewriter):
    """Every rank has all; gradients are copied into buckets, or are views of them."""

    replaces_optimizer = False

    def __init__(self, trace: Trace, usage: Usage, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding

    def loaded(self) -> None:
        sent = sum(parameter.size for parameter in self.usage.parameters)
        for _ in range(-(-sent // (2 * BROADCAST_BYTES))):
            self.book.passing(min(sent, 2 * BROADCAST_BYTES), "communication")
            sent -= 2 * BROADCAST_BYTES
        for size in self._buckets():
            self.book.allocate(size, "communication")

    def _buckets(self) -> list[int]:
        """In the order in which gradients come; a bucket is closed when it has reached its cap."""
        sizes, filled, cap = [], 0, FIRST_BUCKET_BYTES
        for parameter in reversed([each for each in self.usage.parameters if each.trains]):
            filled += parameter.size
            if filled >= cap:
                sizes.append(filled)
                filled, cap = 0, self.sharding.bucket_cap_bytes
        return [*sizes, filled] if filled else sizes

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        if self.sharding.gradients_are_bucket_views:
            self.give_up(number)
