"""torch's DDP: all weights on every rank, gradients averaged in buckets."""

from __future__ import annotations

from autotune.core.trace import ModuleUse, Trace
from autotune.estimate.sharding.rewriter import Rewriter
from autotune.estimate.sharding.sharding_options import Sharding

FIRST_BUCKET_BYTES = 1 << 20
BROADCAST_BYTES, BROADCASTS_IN_FLIGHT = 250 << 20, 2
"""Initial broadcasts: their size, and how many are in flight (torch/csrc/distributed/c10d/comm.cpp)."""


class Ddp(Rewriter):
    """Gradients are copied into buckets, or are views of them."""

    replaces_optimizer = False

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding

    def loaded(self) -> None:
        in_flight: list[int | None] = []
        for size in self._broadcasts():
            if len(in_flight) == BROADCASTS_IN_FLIGHT:
                self.book.free(in_flight.pop(0))
            in_flight.append(self.book.allocate(size, "communication") if size else None)
        for number in in_flight:
            self.book.free(number)
        for size in self._buckets():
            self.book.allocate(size, "communication")

    def _broadcasts(self) -> list[int]:
        """Return the copies that are sent, in order; 0 for a tensor that fills a broadcast alone, which is sent itself.

        Tensors of one dtype are joined until they reach the size. Those of another dtype may come in between.
        """
        closed: list[tuple[int, list[int]]] = []
        filling: dict[int, tuple[int, list[int]]] = {}
        for at, parameter in enumerate(self.usage.parameters):
            width = parameter.size // max(1, parameter.count)
            first, sizes = filling.setdefault(width, (at, []))
            sizes.append(parameter.size)
            if sum(sizes) >= BROADCAST_BYTES:
                closed.append((first, sizes))
                del filling[width]
        return [sum(sizes) if len(sizes) > 1 else 0 for _, sizes in sorted([*closed, *filling.values()])]

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
