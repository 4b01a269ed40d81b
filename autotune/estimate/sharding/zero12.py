"""DeepSpeed's ZeRO-1 and ZeRO-2: flat weights, float32 masters of a partition, bucketed gradients.

The order of allocations is that of deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from autotune.core.trace import ModuleUse, Part, Trace
from autotune.estimate.sharding.rewriter import GRADIENT, PASS, Rewriter, optimizer_of
from autotune.estimate.sharding.sharding_options import Sharding

NORM_BYTES = 8  # norms of gradients are computed in double precision, tensor by tensor
MASTER_BYTES = 4


class Zero(Rewriter):
    """Gradient buckets and optimizer of all stages."""

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage, sharding)
        self.optimizer = optimizer_of(trace, usage)
        self.trained = [index for index, parameter in enumerate(usage.parameters) if parameter.trains]
        first = usage.parameters[self.trained[0]]
        self.width = first.size // first.count if first.count else 1
        self.bucket: list[int] = []
        self.filled = 0
        self.oversized: list[int | None] = []  # gradients that stay outside the contiguous bucket

    def _add_to_bucket(self, parameter: int, number: int, *, outside: bool) -> None:
        if outside:
            self.oversized.append(self.held(number))
        else:
            self.give_up(number)
        self.bucket.append(parameter)
        self.filled += self.usage.parameters[parameter].count

    def _clear_bucket(self) -> None:
        for number in self.oversized:
            self.give_up(number)
        self.oversized.clear()
        self.bucket.clear()
        self.filled = 0

    def _allocate_state(self, count: int) -> int:
        """Allocate the optimizer's state of `count` masters, tensor by tensor; return the last block."""
        return [self.book.allocate(size, "optimizer") for size in self.optimizer.state_tensors(count, MASTER_BYTES)][-1]

    def _gradients_to_masters(self, count: int, *, flattens: bool = True) -> int | None:
        """Flatten the partition's gradients, unless they are one tensor, and widen them to float32; return the block."""
        flat = self.book.allocate(count * self.width, "gradients") if flattens else None
        if self.width == MASTER_BYTES:
            return flat
        widened = self.book.allocate(count * MASTER_BYTES, "gradients")
        self.book.free(flat)
        return widened


@dataclass(frozen=True, kw_only=True)
class Slice:
    """This rank's part of one trainable parameter."""

    parameter: int
    count: int  # elements in this rank's partition
    first: int  # partition in which the parameter begins
    last: int  # partition in which it ends


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that the optimizer holds together: flattened, divided and updated as one tensor."""

    partition: int  # elements of each rank, padded
    slices: tuple[Slice, ...]

    @property
    def owned(self) -> tuple[Slice, ...]:
        return tuple(piece for piece in self.slices if piece.count)


class Zero12(Zero):
    """Stage 1 keeps gradients until the last micro-step; stage 2 reduces them at once."""

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage, sharding)
        self.stage = int(sharding.kind[-1])
        self.groups = [_divided(usage, indices, sharding.ranks, sharding.rank) for indices in _indices_by_group(usage)]
        self.partition = sum(group.partition for group in self.groups)
        self.layout = {piece.parameter: piece for group in self.groups for piece in group.slices}
        self.owned = {piece.parameter: piece for group in self.groups for piece in group.owned}
        self.buffers: list[int] = []
        self.whole: dict[int, int] = {}
        self.kept: int | None = None
        self.fresh: int | None = None
        self.has_state = False
        self._boundary = _boundaries(trace, usage)
        self._passes = -1

    def loaded(self) -> None:
        # 1. Move the weights of each group into one flat tensor, then make this rank's float32 masters.
        part: Part = "weights" if len(self.trained) == len(self.usage.parameters) else "adapters"
        for group in self.groups:
            self.book.empty_cache()
            self.book.allocate(group.partition * self.sharding.ranks * self.width, part)
            for piece in group.slices:
                self.give_up(self.usage.parameters[piece.parameter].number)
            cloned = self.book.allocate(group.partition * self.width, "optimizer") if self.width != MASTER_BYTES else None
            if not self.sharding.offload_optimizer:
                self.book.allocate(group.partition * MASTER_BYTES, "optimizer")
            self.book.free(cloned)
        if not self.sharding.offload_optimizer:
            made = [self.book.allocate(group.partition * MASTER_BYTES, "gradients") for group in self.groups]
            for number in made:
                self.book.free(number)
            return
        # 2. On the host, pinned: masters, 16-bit weights to copy back, gradients, one in transit. On the device: another one.
        largest = max(self.usage.parameters[index].count for index in self.trained)
        self.host_bytes += self.partition * (MASTER_BYTES + self.width + 4) + largest * self.width
        self.book.allocate(largest * self.width, "communication")

    # Micro-step.

    def pass_begins(self, module: int) -> None:
        self._passes += 1

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        if not self.buffers and self.sharding.contiguous_gradients:
            size, count = self.sharding.reduce_bucket_size * self.width, 2 if self.sharding.overlap_comm else 1
            self.buffers = [self.book.allocate(size, "communication") for _ in range(count)]
        if self.stage == 2 or (self.sharding.overlap_comm and self._passes in self._boundary):
            self._into_bucket(parameter, number)
        else:
            self.whole.setdefault(parameter, number)
        if last:
            self._end_of_backward()

    def _into_bucket(self, parameter: int, number: int) -> None:
        count = self.usage.parameters[parameter].count
        if self.filled + count > self.sharding.reduce_bucket_size:
            self._reduce()
        outside = count > self.sharding.reduce_bucket_size or not self.sharding.contiguous_gradients
        self._add_to_bucket(parameter, number, outside=outside)

    def _reduce(self) -> None:
        """Reduce a copy of the bucket (or the bucket, if one piece); copy this rank's part."""
        # Pieces: stretches of the bucket that go to one rank each.
        owners = [owner for index in self.bucket for owner in range(self.layout[index].first, self.layout[index].last + 1)]
        if sum(owner != before for owner, before in zip(owners, [-1, *owners], strict=False)) > 1:
            self.book.passing(self.filled * self.width, "communication")
        for index in self.bucket:
            if index not in self.owned:
                continue
            if self.sharding.offload_optimizer:  # norms of offloaded gradients are computed on the device
                self.book.passing(self.owned[index].count * NORM_BYTES, "workspaces")
            elif self.fresh is None:
                total = sum(self.usage.parameters[one].count for one in self.owned)
                self.fresh = self.book.allocate(total * self.width, "gradients")
        self._clear_bucket()

    def _end_of_backward(self) -> None:
        if self.stage == 1 and not self.sharding.overlap_comm:
            if self._passes not in self._boundary:
                return  # the buffers stay for the micro-step that reduces
            for index, number in sorted(self.whole.items()):
                self._into_bucket(index, number)
            self.whole.clear()
        self._reduce()
        if self.kept is None:
            self.kept, self.fresh = self.fresh, None
        self.book.free(self.fresh)
        self.fresh = None
        for number in self.buffers:
            self.book.free(number)
        self.buffers.clear()

    # Optimizer step.

    def optimizer_begins(self) -> None:
        if self.sharding.offload_optimizer:
            if not self.has_state:
                self.host_bytes += self.optimizer.state_bytes(self.partition, MASTER_BYTES)
            self.has_state = True
            return
        for piece in self.owned.values():
            self.book.passing(piece.count * NORM_BYTES, "workspaces")
        last = max((number for number, group in enumerate(self.groups) if group.owned), default=0)
        for number, group in enumerate(self.groups):
            self._step(group, releases=number == last)
        self.has_state = True

    def _step(self, group: ParameterGroup, *, releases: bool) -> None:
        """Update one group. The reduced gradients of all groups are in one block (`grads_in_partition`),
        which `releases` with the last of them."""
        whole = len(group.owned) == 1 and group.owned[0].count == group.partition
        gradients = self._gradients_to_masters(group.partition, flattens=not whole)
        if releases:
            self.book.free(self.kept)
            self.kept = None
        if not self.has_state:
            self._allocate_state(group.partition)
        self.book.passing(group.partition * MASTER_BYTES * self.optimizer.temporary_copies, "optimizer")
        self.book.free(gradients)


def fullest_rank(usage: ModuleUse, ranks: int) -> int:
    """Return the rank with most reduced gradients: of its partition, and of the whole parameters at its ends."""
    held = [0] * ranks
    for indices in _indices_by_group(usage):
        for piece in _divided(usage, indices, ranks, 0).slices:
            for rank in range(piece.first, piece.last + 1):
                held[rank] += usage.parameters[piece.parameter].size
    return held.index(max(held))


def _indices_by_group(usage: ModuleUse) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for index, parameter in enumerate(usage.parameters):
        if parameter.trains:
            found.setdefault(parameter.group, []).append(index)
    return [indices for _, indices in sorted(found.items())]


def _divided(usage: ModuleUse, indices: list[int], ranks: int, rank: int) -> ParameterGroup:
    """Divide the concatenated parameters of a group into equal, padded partitions."""
    counts = [usage.parameters[index].count for index in indices]
    share = -(-sum(counts) // (2 * ranks)) * 2
    pieces = []
    for index, start, count in zip(indices, [0, *accumulate(counts)], counts, strict=False):
        end = start + count
        inside = max(0, min(end, (rank + 1) * share) - max(start, rank * share))
        pieces.append(Slice(parameter=index, count=inside, first=start // share, last=max(start, end - 1) // share))
    return ParameterGroup(partition=share, slices=tuple(pieces))


def _boundaries(trace: Trace, usage: ModuleUse) -> set[int]:
    """Return the numbers of the last passes with gradients before each optimizer step."""
    steps = [mark.event for mark in trace.marks if mark.phase == "optimizer"]
    found: dict[int, int] = {}  # by steps done when the pass begins
    number, done = -1, 0
    for event, kind, *_ in usage.uses:
        if kind == PASS:
            number, done = number + 1, bisect_right(steps, event)
        elif kind == GRADIENT:
            found[done] = number
    return set(found.values())
