"""DeepSpeed's ZeRO: float32 masters of a partition, bucketed gradients.

Stages 1 and 2 keep the weights in flat tensors; stage 3 partitions everything, and parameters are
gathered around their use. The order of allocations is that of
deepspeed/runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.core.trace import ModuleUse, Part, Trace
from autotune.estimate.sharding.module_uses import UseKind
from autotune.estimate.sharding.rewriter import Rewriter, Sharding, optimizer_of
from autotune.estimate.sharding.zero3_gathering import Gathering

NORM_BYTES = 8  # norms of gradients are computed in double precision, tensor by tensor
# Elements per norm computation of offloaded gradients (`_constant_buffered_norm2`)
NORM_CHUNK = 250_000_000
MASTER_BYTES = 4
HOST_GRADIENT_BYTES = 4  # gradients of an offloaded optimizer are float32
# stream of stage 3's gradient reduction; those of its parameter coordinators have odd numbers
REDUCING = 2


class Zero(Rewriter):
    """Gradient buckets and optimizer of all stages."""

    def __init__(
        self,
        trace: Trace,
        usage: ModuleUse,
        sharding: Sharding,
    ) -> None:
        super().__init__(trace, usage, sharding)
        self.optimizer = optimizer_of(trace, usage)
        self.trained: list[int] = []
        for index, parameter in enumerate(usage.parameters):
            if parameter.trains:
                self.trained.append(index)
        first = usage.parameters[self.trained[0]]
        self.width = first.size // first.count if first.count else 1
        self.bucket: list[int] = []
        self.filled = 0
        self.oversized: list[int | None] = []  # gradients that stay outside the contiguous bucket
        self.has_state = False  # the optimizer's

    def _into_bucket(self, parameter: int, number: int) -> None:
        """Add a gradient to the bucket; a full one is reduced before."""
        count = self.usage.parameters[parameter].count
        size = self.sharding.reduce_bucket_size
        if self.filled and self.filled + count > size:
            self._reduce()
        if self.sharding.contiguous_gradients and count <= size:
            self.give_up(number)
        else:
            self.oversized.append(self.taken_over(number))
        self.bucket.append(parameter)
        self.filled += count

    def _reduce(self) -> None: ...  # and clear the bucket

    def _clear_bucket(self) -> None:
        for gradient in self.oversized:
            self.give_up(gradient)
        self.oversized.clear()
        self.bucket.clear()
        self.filled = 0

    def _update(
        self,
        count: int,
        *,
        is_flat: bool = False,
        reduced: int | None = None,
    ) -> None:
        """Update `count` masters of this rank. Their gradients are flattened, unless they are
        one tensor, and widened to float32. `reduced`: gradients that are released then.
        """
        master_size = count * MASTER_BYTES
        gradients: int | None = None
        if not is_flat:
            gradients = self.book.allocate(count * self.width, "gradients")
        if self.width != MASTER_BYTES:
            flat = gradients
            gradients = self.book.allocate(master_size, "gradients")
            self.book.free(flat)
        self.book.free(reduced)
        if not self.has_state:
            tensors = self.optimizer.state_tensors(count, MASTER_BYTES)
            self.book.allocate_each(tensors, "optimizer")
        self.book.passing(master_size * self.optimizer.temporary_copies, "optimizer")
        self.book.free(gradients)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """This rank's part of one trainable parameter."""

    parameter: int
    count: int  # elements in this rank's partition
    first: int  # partition in which the parameter begins
    last: int  # partition in which it ends


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that the optimizer holds together: flattened, divided and updated as one
    tensor.
    """

    partition: int  # elements of each rank, padded
    slices: tuple[Slice, ...]

    @property
    def owned(self) -> tuple[Slice, ...]:
        return tuple(piece for piece in self.slices if piece.count)


class Zero12(Zero):
    """Stages 1 and 2. Stage 1 keeps gradients until the last micro-step; stage 2 reduces them at
    once.
    """

    def __init__(
        self,
        trace: Trace,
        usage: ModuleUse,
        sharding: Sharding,
    ) -> None:
        super().__init__(trace, usage, sharding)
        self.groups: list[ParameterGroup] = []
        self.layout: dict[int, Slice] = {}  # by parameter
        self.owned: dict[int, Slice] = {}
        for indices in _indices_by_group(usage):
            group = _divided(usage, indices, sharding.ranks, sharding.rank)
            self.groups.append(group)
            for piece in group.slices:
                self.layout[piece.parameter] = piece
            for piece in group.owned:
                self.owned[piece.parameter] = piece
        self.partition = sum(group.partition for group in self.groups)
        self.buffers: list[int] = []
        self.unreduced: dict[int, int] = {}  # gradients of stage 1, by parameter
        # This rank's reduced gradients: of the micro-steps before, and of this one.
        self.accumulated: int | None = None
        self.fresh: int | None = None
        self._boundary = _boundaries(trace, usage)
        self._passes = -1

    def loaded(self) -> None:
        # 1. Move the weights of each group into one flat tensor, then make this rank's masters.
        trains_all = len(self.trained) == len(self.usage.parameters)
        part: Part = "weights" if trains_all else "adapters"
        for group in self.groups:
            partition_size = group.partition * self.width
            self.book.empty_cache()
            self.book.allocate(partition_size * self.sharding.ranks, part)
            for piece in group.slices:
                parameter = self.usage.parameters[piece.parameter]
                self.give_up(parameter.number)
            cloned: int | None = None
            if self.width != MASTER_BYTES:
                cloned = self.book.allocate(partition_size, "optimizer")
            if not self.sharding.offload_optimizer:
                self.book.allocate(group.partition * MASTER_BYTES, "optimizer")
            self.book.free(cloned)
        if not self.sharding.offload_optimizer:
            sizes = [group.partition * MASTER_BYTES for group in self.groups]
            gradients = self.book.allocate_each(sizes, "gradients")
            self.book.free(*gradients)
            return
        # 2. On the host, pinned: masters, 16-bit weights to copy back, gradients, one in transit.
        # On the device: another one in transit.
        in_transit = self.width * max(self.usage.parameters[index].count for index in self.trained)
        width_on_host = MASTER_BYTES + self.width + HOST_GRADIENT_BYTES
        self.host_bytes += self.partition * width_on_host + in_transit
        self.book.allocate(in_transit, "communication")

    # Micro-step.

    def pass_begins(self, module: int) -> None:
        self._passes += 1

    def gradient(
        self,
        parameter: int,
        number: int,
        *,
        last: bool,
    ) -> None:
        if not self.buffers and self.sharding.contiguous_gradients:
            size = self.sharding.reduce_bucket_size * self.width
            count = 2 if self.sharding.overlap_comm else 1
            sizes = [size] * count
            self.buffers = self.book.allocate_each(sizes, "communication")
        reduces_in_stage_1 = self.sharding.overlap_comm and self._passes in self._boundary
        if self.sharding.kind == "zero2" or reduces_in_stage_1:
            self._into_bucket(parameter, number)
        else:
            self.unreduced.setdefault(parameter, number)
        if last:
            self._end_of_backward()

    def _reduce(self) -> None:
        """Reduce a copy of the bucket (or the bucket, if one piece); copy this rank's part."""
        # Pieces: stretches of the bucket that go to one rank each.
        owners: set[int] = set()
        for index in self.bucket:
            piece = self.layout[index]
            owners.add(piece.first)
            owners.add(piece.last)
        if len(owners) > 1:
            self.book.passing(self.filled * self.width, "communication")
        for index in self.bucket:
            if index not in self.owned:
                continue
            # Norms of offloaded gradients are computed on the device.
            if self.sharding.offload_optimizer:
                norm_size = self.owned[index].count * NORM_BYTES
                self.book.passing(norm_size, "workspaces")
            elif self.fresh is None:
                count = sum(self.usage.parameters[parameter].count for parameter in self.owned)
                self.fresh = self.book.allocate(count * self.width, "gradients")
        self._clear_bucket()

    def _end_of_backward(self) -> None:
        if self.sharding.kind == "zero1" and not self.sharding.overlap_comm:
            if self._passes not in self._boundary:
                return  # the buffers stay for the micro-step that reduces
            for index, number in sorted(self.unreduced.items()):
                self._into_bucket(index, number)
            self.unreduced.clear()
        self._reduce()
        if self.accumulated is None:
            self.accumulated = self.fresh
            self.fresh = None
        self.book.free(self.fresh, *self.buffers)
        self.fresh = None
        self.buffers.clear()

    def optimizer_begins(self) -> None:
        if self.sharding.offload_optimizer:
            if not self.has_state:
                state = self.optimizer.state_bytes(self.partition, MASTER_BYTES)
                self.host_bytes += state
            self.has_state = True
            return
        for piece in self.owned.values():
            self.book.passing(piece.count * NORM_BYTES, "workspaces")
        # The reduced gradients of all groups are in one block (`grads_in_partition`), released with
        # the last of them.
        last = 0
        for number, group in enumerate(self.groups):
            if group.owned:
                last = number
        for number, group in enumerate(self.groups):
            owned_counts = [piece.count for piece in group.owned]
            is_flat = owned_counts == [group.partition]
            reduced = self.accumulated if number == last else None
            self._update(group.partition, is_flat=is_flat, reduced=reduced)
        self.accumulated = None
        self.has_state = True


def fullest_rank(usage: ModuleUse, ranks: int) -> int:
    """Return the rank with most reduced gradients: of its partition, and of the whole parameters
    at its ends.
    """
    gradient_bytes = [0] * ranks
    for indices in _indices_by_group(usage):
        group = _divided(usage, indices, ranks, rank=0)
        for piece in group.slices:
            parameter = usage.parameters[piece.parameter]
            for rank in range(piece.first, piece.last + 1):
                gradient_bytes[rank] += parameter.size
    return gradient_bytes.index(max(gradient_bytes))


def _indices_by_group(usage: ModuleUse) -> list[list[int]]:
    indices: dict[int, list[int]] = {}
    for index, parameter in enumerate(usage.parameters):
        if parameter.trains:
            members = indices.setdefault(parameter.group, [])
            members.append(index)
    return [indices[group] for group in sorted(indices)]


def _divided(
    usage: ModuleUse,
    indices: list[int],
    ranks: int,
    rank: int,
) -> ParameterGroup:
    """Divide the concatenated parameters of a group into equal, padded partitions."""
    total = sum(usage.parameters[index].count for index in indices)
    pairs = -(-total // (2 * ranks))
    share = 2 * pairs
    share_start = rank * share
    share_end = share_start + share
    pieces = []
    start = 0
    for index in indices:
        end = start + usage.parameters[index].count
        inside = min(end, share_end) - max(start, share_start)
        piece = Slice(
            parameter=index,
            count=max(0, inside),
            first=start // share,
            last=max(start, end - 1) // share,
        )
        pieces.append(piece)
        start = end
    return ParameterGroup(partition=share, slices=tuple(pieces))


def _boundaries(trace: Trace, usage: ModuleUse) -> set[int]:
    """Return the numbers of the last passes with gradients before each optimizer step."""
    steps = [mark.event for mark in trace.marks if mark.phase == "optimizer"]
    last_passes: dict[int, int] = {}  # by steps done when the pass begins
    number = -1
    done = 0
    for event, kind, *_ in usage.uses:
        if kind == UseKind.PASS:
            number += 1
            done = bisect_right(steps, event)
        elif kind == UseKind.GRADIENT:
            last_passes[done] = number
    return set(last_passes.values())


class Zero3(Zero):
    """Stage 3; ranks differ by padding alone."""

    def __init__(
        self,
        trace: Trace,
        usage: ModuleUse,
        sharding: Sharding,
    ) -> None:
        super().__init__(trace, usage, sharding)
        self.widths = [1] * len(usage.parameters)
        for index, parameter in enumerate(usage.parameters):
            if parameter.count:
                self.widths[index] = parameter.size // parameter.count
        self.groups = self._groups()
        self._reduces = False
        self._rolled_out = 0  # step of the latest rollout
        streams = trace.device == "cuda" and sharding.overlap_comm
        self._reduction_stream = REDUCING if streams else 0
        # The policy, and a reference model that has an engine and a coordinator of its own.
        roots = {which for _, kind, which, *_ in usage.uses if kind == UseKind.PASS}
        self._roots = sorted({0, *roots})
        self._model_of: dict[int, int] = {}  # by parameter
        self._persistent: list[frozenset[int]] = []
        self._gatherings: list[Gathering] = []
        bounds = (*self._roots, len(usage.modules))
        for model, (begin, end) in enumerate(pairwise(bounds)):
            modules = usage.modules[begin:end]
            parameters = sorted(set().union(*modules))
            self._model_of.update(dict.fromkeys(parameters, model))
            self._persistent.append(self._small(parameters))
            gathering = Gathering(
                usage,
                self.book,
                sharding,
                self.widths,
                self._persistent[model],
                through_gloo=trace.device == "cpu",
                stream=(1 + 2 * model) * streams,
            )
            self._gatherings.append(gathering)
        self.gathering = self._gatherings[0]
        if trace.device == "cuda":
            # Partitioned one by one while the model is built: never all on the device.
            for parameter in usage.parameters:
                if parameter.number is not None:
                    self.gone.add(parameter.number)

    def _share(self, *indices: int) -> int:
        """Return this rank's elements of the parameters, each of which is divided alone."""
        total = 0
        for index in indices:
            count = self.usage.parameters[index].count
            total += -(-count // self.sharding.ranks)
        return total

    def rewritten(self) -> Trace:
        """Return the rank's trace; a rollout gathers the policy's parameters, which remain
        listed in it.
        """
        policy = []
        for index, parameter in enumerate(self.usage.parameters):
            if self._model_of.get(index) == 0:
                policy.append(parameter)
        usage = ModuleUse(
            parameters=tuple(policy),
            modules=(),
            uses=(),
        )
        return replace(super().rewritten(), usage=usage)

    def _gathering_of(self, module: int) -> Gathering:
        model = bisect_right(self._roots, module) - 1
        return self._gatherings[model]

    def _small(self, indices: Sequence[int]) -> frozenset[int]:
        """Return a model's small parameters, which stay gathered, up to the model's threshold."""
        small: set[int] = set()
        total = 0
        for index in indices:
            count = self.usage.parameters[index].count
            fits = count + total <= self.sharding.model_persistence_threshold
            if fits and count <= self.sharding.param_persistence_threshold:
                small.add(index)
                total += count
        return frozenset(small)

    def _groups(self) -> list[list[int]]:
        """Return the parameters that the optimizer updates together."""
        groups: list[list[int]] = [[]]
        count = 0
        for index in self.trained:
            if count >= self.sharding.sub_group_size:
                groups.append([])
                count = 0
            groups[-1].append(index)
            count += self._share(index)
        return groups

    def loaded(self) -> None:
        # 1. Partition the parameters.
        trained: list[int] = []
        for index, parameter in enumerate(self.usage.parameters):
            size = self._share(index) * self.widths[index]
            model = self._model_of[index]
            is_persistent = index in self._persistent[model]
            if self.sharding.offload_parameters and not is_persistent:
                self.host_bytes += size
            elif parameter.trains:
                trained.append(size)
            else:
                self.book.allocate(size, "weights")
            self.give_up(parameter.number)
        # 2. Trained parts are in one buffer, filled through the host with the cache emptied.
        if trained:
            parts: list[int] = []
            if self.trace.device == "cpu":
                parts = self.book.allocate_each(trained, "weights")
            self.book.allocate(sum(trained), "weights")
            self.book.free(*parts)
        # 3. Masters, the gradients' buckets.
        count = self._share(*self.trained)
        if self.sharding.offload_optimizer:
            self.host_bytes += count * (MASTER_BYTES + HOST_GRADIENT_BYTES + self.width)
        else:
            sizes = [self._share(*group) * MASTER_BYTES for group in self.groups]
            for size in sizes:
                converted = self.book.allocate(size, "optimizer")
                self.book.allocate(size, "optimizer")
                self.book.free(converted)
            self.book.passing(max(sizes), "gradients")
        bucket_size = self.sharding.reduce_bucket_size * self.width
        self.book.allocate(bucket_size, "communication")
        if not self.sharding.offload_optimizer:
            self.book.allocate(count * self.width, "gradients")
        # 4. Gather each parameter once to find where its gradient is accumulated.
        copies = 1 if self.trace.device == "cuda" else 2
        for index in self.trained:
            count = self._share(index) * self.sharding.ranks
            size = count * self.widths[index]
            self.book.passing(copies * size, "communication")

    # Micro-step.

    def pass_begins(self, module: int) -> None:
        gathering = self._gathering_of(module)
        follows_rollout = self.usage.forgets_order and self.step_number != self._rolled_out
        if gathering is self.gathering and follows_rollout:
            self._rolled_out = self.step_number
            gathering.forget_order()
        gathering.begin_pass()

    def forward_begins(self, module: int) -> None:
        gathering = self._gathering_of(module)
        gathering.fetch(module, forward=True, recomputing=self.phase == "backward")

    def forward_ends(self, module: int) -> None:
        gathering = self._gathering_of(module)
        gathering.release(module, forward=True)

    def read(self, parameter: int) -> None:
        # DeepSpeed intercepts such reads in its engine's forward alone.
        if self.phase != "backward":
            model = self._model_of[parameter]
            self._gatherings[model].read(parameter)

    def backward_begins(self, module: int) -> None:
        self.gathering.fetch(module, forward=False)

    def backward_ends(self, module: int) -> None:
        self.gathering.release(module, forward=False)

    def gradient(
        self,
        parameter: int,
        number: int,
        *,
        last: bool,
    ) -> None:
        self._reduces = True
        self._into_bucket(parameter, number)

    def _reduce(self) -> None:
        """Reduce a copy arranged by rank, or one gradient that divides evenly."""
        counts = [self.usage.parameters[index].count for index in self.bucket]
        is_even = len(counts) == 1 and counts[0] % self.sharding.ranks == 0
        through_gloo = self.trace.device == "cpu"  # it reduces in a copy of its own
        copies = (not is_even) + through_gloo
        padded_count = self._share(*self.bucket) * self.sharding.ranks
        size = padded_count * self.width
        if self.bucket and copies:
            copied = self.book.allocate(size * copies, "communication", self._reduction_stream)
            self.book.free(copied)
        if self.sharding.offload_optimizer:
            # A part is copied back to the device for its norm, then to the host.
            for index in self.bucket:
                count = self._share(index)
                norm_size = min(count, NORM_CHUNK) * NORM_BYTES
                self.book.passing(count * self.width + norm_size, "workspaces")
        self._clear_bucket()

    def backward_over(self) -> None:
        if self._reduces:
            self._reduce()
            self._reduces = False
        self.gathering.end_backward()

    def optimizer_begins(self) -> None:
        self.gathering.release_all()
        if not self.sharding.offload_optimizer:
            for index in self.trained:
                norm_size = self._share(index) * NORM_BYTES
                self.book.passing(norm_size, "workspaces")
        for group in self.groups:
            count = self._share(*group)
            if not self.sharding.offload_optimizer:
                self._update(count)
            elif not self.has_state:
                self.host_bytes += self.optimizer.state_bytes(count, MASTER_BYTES)
        self.has_state = True
        self.gathering.gather_persistent()
