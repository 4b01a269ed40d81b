"""torch's DDP: all weights on every rank, gradients averaged in buckets.

In the first step one bucket holds all gradients. The next forward pass with gradients replaces it by smaller
ones in the order in which the gradients came (`_rebuild_buckets`). Where parameters may be unused, small
buckets in the reversed order of the parameters are there from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.trace import ModuleUse, Trace
from autotune.estimate.sharding.rewriter import Rewriter
from autotune.estimate.sharding.sharding_options import BUCKET_CAP_BYTES, Sharding

FIRST_BUCKET_BYTES = 1 << 20
BROADCAST_BYTES, BROADCASTS_IN_FLIGHT = 250 << 20, 2
"""Initial broadcasts: their size, and how many are in flight (torch/csrc/distributed/c10d/comm.cpp)."""


class Ddp(Rewriter):
    """Gradients are copied into buckets, or are views of them."""

    replaces_optimizer = False

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage, sharding)
        self.buckets: list[int] = []
        self.came: dict[int, None] = {}  # parameters in the order of their first gradients
        self.rebuilds = sharding.static_graph or not sharding.find_unused_parameters

    def loaded(self) -> None:
        in_flight: list[int | None] = []
        for size in self._broadcasts():
            if len(in_flight) == BROADCASTS_IN_FLIGHT:
                self.book.free(in_flight.pop(0))
            in_flight.append(self.book.allocate(size, "communication") if size else None)
        for number in in_flight:
            self.book.free(number)
        trained = [parameter.size for parameter in self.usage.parameters if parameter.trains]
        first = ([sum(trained)] if trained else []) if self.rebuilds else self._divided(trained)[::-1]
        self.buckets = [self.book.allocate(size, "communication") for size in first]

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

    def _divided(self, sizes: Sequence[int]) -> list[int]:
        """Return bucket sizes; a bucket is closed when it reaches its cap."""
        found, filled, later = [], 0, self.sharding.bucket_cap_bytes
        cap = FIRST_BUCKET_BYTES if later == BUCKET_CAP_BYTES else later
        for size in sizes:
            filled += size
            if filled >= cap:
                found.append(filled)
                filled, cap = 0, later
        return [*found, filled] if filled else found

    def pass_begins(self, module: int) -> None:
        if not (self.rebuilds and self.came and self.phase == "forward" and self.step_number):
            return
        for number in self.buckets:
            self.book.free(number)
        rebuilt = self._divided([self.usage.parameters[index].size for index in self.came])
        self.buckets = [self.book.allocate(size, "communication") for size in rebuilt]
        self.rebuilds = False

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        self.came.setdefault(parameter)
        if self.sharding.gradient_as_bucket_view:
            self.give_up(number)
