"""DeepSpeed's ZeRO-1 and ZeRO-2, as their optimizer handles each gradient: flat weights, float32 masters of a part, buckets.

The order of what is allocated and freed follows deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from autotune.predict.sharding.book import Optimizer, Rewriter, optimizer_of
from autotune.trace import Part, Trace, Usage

if TYPE_CHECKING:
    from autotune.predict.sharding import Sharding

NORM_BYTES = 8
"""Gradients' norms are taken in double precision, tensor by tensor."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What this rank owns of one trainable parameter."""

    parameter: int
    count: int
    """Elements of it in this rank's partition."""

    first: int
    last: int
    """The partitions that the parameter begins and ends in."""


class Zero12(Rewriter):
    """Stage 1 keeps whole gradients until the last micro-step; stage 2 reduces them as they come."""

    def __init__(self, trace: Trace, usage: Usage, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding
        self.stage = int(sharding.kind[-1])
        self.optimizer: Optimizer = optimizer_of(trace, usage)
        self.trained = [index for index, parameter in enumerate(usage.parameters) if parameter.trains]
        first = usage.parameters[self.trained[0]]
        self.width = first.size // first.count
        self.partition, self.slices = self._partition()
        self.layout = {piece.parameter: piece for piece in self.slices}
        self.owned = {piece.parameter: piece for piece in self.slices if piece.count}
        self.buffers: list[int] = []
        self.bucket: list[int] = []
        self.filled = 0
        self.oversized: list[int | None] = []
        self.whole: dict[int, int] = {}
        self.kept: int | None = None
        self.fresh: int | None = None
        self.state: int | None = None
        self.host_bytes = 0
        self._boundary = _boundaries(trace, usage)
        self._passes = -1

    @property
    def weights_part(self) -> Part:
        return "weights" if len(self.trained) == len(self.usage.parameters) else "adapters"

    # Where everything is laid out.

    def _partition(self) -> tuple[int, list[Slice]]:
        """All trainable parameters end to end, padded to an even share in units of 4 bytes of bfloat16."""
        ranks, rank = self.sharding.ranks, self.sharding.rank
        counts = [self.usage.parameters[index].count for index in self.trained]
        share = -(-sum(counts) // (2 * ranks)) * 2
        starts = [0, *accumulate(counts)]
        pieces = []
        for index, start, count in zip(self.trained, starts, counts, strict=False):
            end = start + count
            inside = max(0, min(end, (rank + 1) * share) - max(start, rank * share))
            pieces.append(Slice(parameter=index, count=inside, first=start // share, last=max(start, end - 1) // share))
        return share, pieces

    def loaded(self) -> None:
        """Weights move into one flat tensor; then this rank's float32 masters."""
        flat = self.book.allocate(self.partition * self.sharding.ranks * self.width, self.weights_part)
        del flat
        for index in self.trained:
            self.give_up(self.usage.parameters[index].number)
        cloned = self.book.allocate(self.partition * self.width, "optimizer") if self.width != 4 else None
        masters = self._allocate_optimizer(self.partition * 4)
        del masters
        self.book.free(cloned)
        if self.sharding.offload_optimizer:
            self._offload_buffers()
        else:
            self.book.passing(self.partition * 4, "gradients")

    def _allocate_optimizer(self, size: int) -> int | None:
        if self.sharding.offload_optimizer:
            self.host_bytes += size
            return None
        return self.book.allocate(size, "optimizer")

    def _offload_buffers(self) -> None:
        """Pinned on the host: 16-bit weights on their way back, gradients, one in transit; another in transit on the device."""
        largest = max(self.usage.parameters[index].count for index in self.trained)
        self.host_bytes += self.partition * (self.width + 4) + largest * self.width
        self.book.allocate(largest * self.width, "communication")

    # A micro-step.

    def pass_begins(self) -> None:
        self._passes += 1

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        self._set_up_buckets()
        if self.stage == 2 or self.sharding.overlap_comm:
            if self.stage == 2 or self._at_boundary:
                self._into_bucket(parameter, number)
            else:
                self._keep_whole(parameter, number)
        else:
            self._keep_whole(parameter, number)
        if last:
            self._end_of_backward()

    @property
    def _at_boundary(self) -> bool:
        return self._passes in self._boundary

    def _set_up_buckets(self) -> None:
        if self.buffers or not self.sharding.contiguous_gradients:
            return
        for _ in range(2 if self.sharding.overlap_comm else 1):
            self.buffers.append(self.book.allocate(self.sharding.reduce_bucket_size * self.width, "communication"))

    def _keep_whole(self, parameter: int, number: int) -> None:
        self.whole.setdefault(parameter, number)

    def _into_bucket(self, parameter: int, number: int) -> None:
        count = self.usage.parameters[parameter].count
        if self.filled + count > self.sharding.reduce_bucket_size:
            self._reduce()
        if count > self.sharding.reduce_bucket_size or not self.sharding.contiguous_gradients:
            self.oversized.append(self.held(number))
        else:
            self.give_up(number)
        self.bucket.append(parameter)
        self.filled += count

    def _reduce(self) -> None:
        """The bucket is copied for the all-reduce unless it is one piece; what is this rank's own is copied out of it."""
        if self._pieces() > 1:
            self.book.passing(self.filled * self.width, "communication")
        for index in self.bucket:
            if index in self.owned and not self.sharding.offload_optimizer:
                self._own_gradients()
            elif index in self.owned:
                self._to_host(index)
        for number in self.oversized:
            self.give_up(number)
        self.oversized.clear()
        self.bucket.clear()
        self.filled = 0

    def _pieces(self) -> int:
        """Stretches of the bucket that go to one rank each; neighbours that go to the same are one."""
        owners = [owner for index in self.bucket for owner in range(self.layout[index].first, self.layout[index].last + 1)]
        return sum(owner != before for owner, before in zip(owners, [-1, *owners], strict=False))

    def _own_gradients(self) -> None:
        if self.fresh is None:
            total = sum(self.usage.parameters[index].count for index in self.owned)
            self.fresh = self.book.allocate(total * self.width, "gradients")

    def _to_host(self, index: int) -> None:
        """The norm of what goes to the host is taken on the device."""
        self.book.passing(self.owned[index].count * NORM_BYTES, "workspaces")

    def _end_of_backward(self) -> None:
        if self.stage == 1 and not self.sharding.overlap_comm:
            if not self._at_boundary:
                return  # the buckets stay for the micro-step that reduces
            for index, number in sorted(self.whole.items()):
                self._into_bucket(index, number)
            self.whole.clear()
        self._reduce()
        if self.kept is None:
            self.kept, self.fresh = self.fresh, None
        self.book.free(self.fresh)
        self.fresh = None
        self._release_buckets()

    def _release_buckets(self) -> None:
        for number in self.buffers:
            self.book.free(number)
        self.buffers.clear()

    # A step.

    def optimizer_begins(self) -> None:
        if self.sharding.offload_optimizer:
            self._step_on_host()
            return
        for piece in self.owned.values():
            self.book.passing(piece.count * NORM_BYTES, "workspaces")
        flat = self.book.allocate(self.partition * self.width, "gradients")
        gradients = flat if self.width == 4 else self.book.allocate(self.partition * 4, "gradients")
        if self.width != 4:
            self.book.free(flat)
        self.book.free(self.kept)
        self.kept = None
        self._update(self.partition)
        self.book.free(gradients)

    def _update(self, count: int) -> None:
        if self.state is None:
            self.state = self.book.allocate(self.optimizer.state_bytes(count, 4), "optimizer")
        self.book.passing(count * 4 * self.optimizer.temporary_copies, "optimizer")

    def _step_on_host(self) -> None:
        if self.state is None:
            self.state = -1
            self.host_bytes += self.optimizer.state_bytes(self.partition, 4)


def _boundaries(trace: Trace, usage: Usage) -> set[int]:
    """The passes, by number, whose gradients the optimizer step uses: the last with gradients before each step."""
    steps = [mark.event for mark in trace.marks if mark.phase == "optimizer"]
    found: set[int] = set()
    number, pending, at = -1, None, 0
    for event, kind, *_ in usage.uses:
        while at < len(steps) and steps[at] <= event and kind == 0:
            if pending is not None:
                found.add(pending)
            pending, at = None, at + 1
        if kind == 0:
            number += 1
        elif kind == 5:
            pending = number
    return found if pending is None else found | {pending}
