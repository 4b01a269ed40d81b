"""DeepSpeed's ZeRO-3: everything is partitioned, and parameters are gathered around their use.

The order of allocations is that of deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autotune.core.trace import ModuleUse, Trace
from autotune.estimate.sharding.rewriter import PASS
from autotune.estimate.sharding.sharding_options import Sharding
from autotune.estimate.sharding.zero3_gathering import Gathering
from autotune.estimate.sharding.zero12 import MASTER_BYTES, NORM_BYTES, Zero

REDUCING = 2
"""Stream of the gradients' reduction; those of the parameter coordinators have odd numbers."""

NORM_CHUNK = 250_000_000
"""Elements per norm computation of offloaded gradients (`_constant_buffered_norm2`)."""


class Zero3(Zero):
    """Rewriter of one rank; ranks differ by padding alone."""

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage, sharding)
        self.widths = [parameter.size // parameter.count if parameter.count else 1 for parameter in usage.parameters]
        self.groups = self._groups()
        self.states: dict[int, int] = {}
        self._reduces = False
        self._rolled_out = 0  # step of the latest rollout
        streams = trace.device == "cuda" and sharding.overlap_comm
        self._reduction_stream = REDUCING if streams else 0
        # The policy, and a reference model that has an engine and a coordinator of its own.
        self._roots = sorted({0, *(which for _, kind, which, *_ in usage.uses if kind == PASS)})
        ends = pairwise((*self._roots, len(usage.modules)))
        owned = [sorted({index for held in usage.modules[begin:end] for index in held}) for begin, end in ends]
        self._owner = {index: number for number, indices in enumerate(owned) for index in indices}
        self._persistent = [self._small(indices) for indices in owned]
        gloo = trace.device == "cpu"
        self._gatherings = [
            Gathering(usage, self.book, sharding, self.widths, small, through_gloo=gloo, stream=(1 + 2 * number) * streams)
            for number, small in enumerate(self._persistent)
        ]
        self.gathering = self._gatherings[0]
        if trace.device == "cuda":
            # Partitioned one by one while the model is built: never all on the device.
            self.gone |= {parameter.number for parameter in usage.parameters if parameter.number is not None}

    def _share(self, index: int) -> int:
        return -(-self.usage.parameters[index].count // self.sharding.ranks)

    def _shares(self, indices: list[int]) -> int:
        return sum(self._share(index) for index in indices)

    def rewritten(self) -> Trace:
        """Return the rank's trace; a rollout gathers the policy's parameters, which remain listed in it."""
        policy = tuple(self.usage.parameters[index] for index, model in sorted(self._owner.items()) if model == 0)
        return replace(super().rewritten(), usage=ModuleUse(parameters=policy, modules=(), uses=()))

    def _gathering_of(self, module: int) -> Gathering:
        return self._gatherings[bisect_right(self._roots, module) - 1]

    def _small(self, indices: Sequence[int]) -> frozenset[int]:
        """Return a model's small parameters, which stay gathered, up to the model's threshold."""
        kept: set[int] = set()
        total = 0
        for index in indices:
            parameter = self.usage.parameters[index]
            fits = parameter.count + total <= self.sharding.model_persistence_threshold
            if fits and parameter.count <= self.sharding.param_persistence_threshold:
                kept.add(index)
                total += parameter.count
        return frozenset(kept)

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

    # Load.

    def loaded(self) -> None:
        # 1. Partition the parameters.
        trained: list[int] = []
        for index, parameter in enumerate(self.usage.parameters):
            size = self._share(index) * self.widths[index]
            if self.sharding.offload_parameters and index not in self._persistent[self._owner[index]]:
                self.host_bytes += size
            elif parameter.trains:
                trained.append(size)
            else:
                self.book.allocate(size, "weights")
            self.give_up(parameter.number)
        # 2. Trained parts are in one buffer, which was filled through the host with the cache emptied.
        if trained:
            apart = [self.book.allocate(size, "weights") for size in trained] if self.trace.device == "cpu" else []
            self.book.allocate(sum(trained), "weights")
            for part in apart:
                self.book.free(part)
        # 3. Masters, the gradients' buckets.
        count = self._shares(self.trained)
        if self.sharding.offload_optimizer:
            self.host_bytes += count * (4 + 4 + self.width)
        else:
            for group in self.groups:
                converted = self.book.allocate(self._shares(group) * MASTER_BYTES, "optimizer")
                self.book.allocate(self._shares(group) * MASTER_BYTES, "optimizer")
                self.book.free(converted)
            self.book.passing(max(self._shares(group) for group in self.groups) * MASTER_BYTES, "gradients")
        self.book.allocate(self.sharding.reduce_bucket_size * self.width, "communication")
        if not self.sharding.offload_optimizer:
            self.book.allocate(count * self.width, "gradients")
        # 4. Gather each parameter once to find where its gradient is accumulated.
        for index in self.trained:
            size = self._share(index) * self.sharding.ranks * self.widths[index]
            self.book.passing(size if self.trace.device == "cuda" else 2 * size, "communication")

    # Micro-step.

    def pass_begins(self, module: int) -> None:
        gathering = self._gathering_of(module)
        if gathering is self.gathering and self.usage.forgets_order and self.step_number != self._rolled_out:
            self._rolled_out = self.step_number
            gathering.forget_order()
        gathering.begin_pass()

    def forward_begins(self, module: int) -> None:
        self._gathering_of(module).fetch(module, forward=True, recomputing=self.phase == "backward")

    def forward_ends(self, module: int) -> None:
        self._gathering_of(module).release(module, forward=True)

    def read(self, parameter: int) -> None:
        if self.phase != "backward":  # DeepSpeed intercepts such reads in its engine's forward alone
            self._gatherings[self._owner[parameter]].read(parameter)

    def backward_begins(self, module: int) -> None:
        self.gathering.fetch(module, forward=False)

    def backward_ends(self, module: int) -> None:
        self.gathering.release(module, forward=False)

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        self._reduces = True
        count = self.usage.parameters[parameter].count
        if self.filled and self.filled + count > self.sharding.reduce_bucket_size:
            self._reduce()
        inside = self.sharding.contiguous_gradients and self.filled + count <= self.sharding.reduce_bucket_size
        self._add_to_bucket(parameter, number, outside=not inside)

    def _reduce(self) -> None:
        """Reduce a copy arranged by rank, or one gradient that divides evenly."""
        single = len(self.bucket) == 1 and self.usage.parameters[self.bucket[0]].count % self.sharding.ranks == 0
        size = self._shares(self.bucket) * self.sharding.ranks * self.width
        copies = (not single) + (self.trace.device == "cpu")  # gloo reduces in a copy of its own
        if self.bucket and copies:
            self.book.free(self.book.allocate(size * copies, "communication", self._reduction_stream))
        if self.sharding.offload_optimizer:
            for index in self.bucket:  # a part is copied back to the device for its norm, then to the host
                norm = min(self._share(index), NORM_CHUNK) * NORM_BYTES
                self.book.passing(self._share(index) * self.width + norm, "workspaces")
        self._clear_bucket()

    def backward_over(self) -> None:
        if self._reduces:
            self._reduce()
            self._reduces = False
        self.gathering.end_backward()

    # Optimizer step.

    def optimizer_begins(self) -> None:
        self.gathering.release_all()
        for number, group in enumerate(self.groups):
            if not self.sharding.offload_optimizer:
                self._step(number, group)
            elif number not in self.states:
                self.states[number] = -1
                self.host_bytes += self.optimizer.state_bytes(self._shares(group), MASTER_BYTES)
        self.gathering.gather_persistent()

    def _step(self, number: int, group: list[int]) -> None:
        count = self._shares(group)
        if number == 0:
            for index in self.trained:
                self.book.passing(self._share(index) * NORM_BYTES, "workspaces")
        gradients = self._gradients_to_masters(count)
        if number not in self.states:
            self.states[number] = self._allocate_state(count)
        self.book.passing(count * MASTER_BYTES * self.optimizer.temporary_copies, "optimizer")
        self.book.free(gradients)
