"""DeepSpeed's ZeRO-3: parameters in parts, gathered around their use; gradients reduced into parts; masters and state of a part.

The order of what is allocated and freed follows deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.predict.sharding.book import Optimizer, Rewriter, optimizer_of
from autotune.predict.sharding.gathering import Gathering
from autotune.predict.sharding.zero import NORM_BYTES
from autotune.trace import Trace, Usage

if TYPE_CHECKING:
    from autotune.predict.sharding import Sharding


NORM_CHUNK = 250_000_000
"""Elements whose norm is taken at a time where gradients go to the host (`_constant_buffered_norm2`)."""


class Zero3(Rewriter):
    """One rank; ranks differ by padding alone."""

    def __init__(self, trace: Trace, usage: Usage, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding
        self.optimizer: Optimizer = optimizer_of(trace, usage)
        self.trained = [index for index, parameter in enumerate(usage.parameters) if parameter.trains]
        self.widths = [parameter.size // parameter.count if parameter.count else 1 for parameter in usage.parameters]
        self.width = self.widths[self.trained[0]]
        self.groups = self._groups()
        self.states: dict[int, int] = {}
        self.bucket: list[int] = []
        self.filled = 0
        self.oversized: list[int | None] = []
        self.host_bytes = 0
        self._reduces = False
        self.gathering = Gathering(
            usage,
            self.book,
            ranks=sharding.ranks,
            widths=self.widths,
            persistent=self._persistent(),
            prefetch=sharding.prefetch_bucket_size,
            max_live=sharding.max_live_parameters,
            max_reuse=sharding.max_reuse_distance,
            offloaded=sharding.offload_parameters,
            through_gloo=trace.device == "cpu",
        )
        if trace.device == "cuda":
            # Parameters are cut one by one while the model is built: they are never all on the device.
            self.gone |= {parameter.number for parameter in usage.parameters if parameter.number is not None}

    def _share(self, index: int) -> int:
        return -(-self.usage.parameters[index].count // self.sharding.ranks)

    def _persistent(self) -> frozenset[int]:
        kept: set[int] = set()
        total = 0
        for index, parameter in enumerate(self.usage.parameters):
            if parameter.count + total > self.sharding.model_persistence_threshold:
                continue
            if parameter.count <= self.sharding.param_persistence_threshold:
                kept.add(index)
                total += parameter.count
        return frozenset(kept)

    def _groups(self) -> list[list[int]]:
        """What the optimizer updates at a time."""
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
        flat: list[int] = []
        for index in range(len(self.usage.parameters)):
            size = self._share(index) * self.widths[index]
            if self.sharding.offload_parameters and index not in self.gathering._persistent:
                self.host_bytes += size
            else:
                part = self.book.allocate(size, "weights")
                flat += [part] if self.usage.parameters[index].trains else []
            self.give_up(self.usage.parameters[index].number)
        self._flatten(flat)
        count = sum(self._share(index) for index in self.trained)
        if self.sharding.offload_optimizer:
            self.host_bytes += count * (4 + 4 + self.width)
        else:
            self._make_masters(count)
        self.book.allocate(self.sharding.reduce_bucket_size * self.width, "communication")
        if not self.sharding.offload_optimizer:
            self.book.allocate(count * self.width, "gradients")
        self._hook()

    def _flatten(self, parts: list[int]) -> None:
        """Trained parts move into one buffer, by way of the host."""
        if not parts:
            return
        size = sum(self.book.sizes[part] for part in parts)
        whole = self.book.allocate(size, "weights") if self.trace.device == "cpu" else None
        for part in parts:
            self.book.free(part)
        if whole is None:
            self.book.allocate(size, "weights")

    def _make_masters(self, count: int) -> None:
        for group in self.groups:
            size = sum(self._share(index) for index in group) * 4
            converted = self.book.allocate(size, "optimizer")
            self.book.allocate(size, "optimizer")
            self.book.free(converted)
        self.book.passing(max(sum(self._share(index) for index in group) for group in self.groups) * 4, "gradients")

    def _hook(self) -> None:
        """To find where a parameter's gradient is accumulated each is gathered once."""
        for index in self.trained:
            size = self._share(index) * self.sharding.ranks * self.widths[index]
            self.book.passing(size if self.trace.device == "cuda" else 2 * size, "communication")

    # A pass.

    def pass_begins(self) -> None:
        self._end_of_backward()
        self.gathering.begin_pass()

    def forward_begins(self, module: int) -> None:
        self.gathering.fetch(module, forward=True, recomputing=self.phase == "backward")

    def forward_ends(self, module: int) -> None:
        self.gathering.release(module, forward=True)

    def read(self, parameter: int) -> None:
        if self.phase != "backward":  # DeepSpeed looks for such reads inside of its engine's forward alone
            self.gathering.read(parameter)

    def backward_begins(self, module: int) -> None:
        self.gathering.fetch(module, forward=False)

    def backward_ends(self, module: int) -> None:
        self.gathering.release(module, forward=False)

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        self._reduces = True
        count = self.usage.parameters[parameter].count
        if self.filled and self.filled + count > self.sharding.reduce_bucket_size:
            self._reduce()
        if self.sharding.contiguous_gradients and self.filled + count <= self.sharding.reduce_bucket_size:
            self.give_up(number)
        else:
            self.oversized.append(self.held(number))
        self.bucket.append(parameter)
        self.filled += count

    def _reduce(self) -> None:
        """Parts are laid side by side for each rank, in a copy unless it is one gradient that divides evenly."""
        single = len(self.bucket) == 1 and self.usage.parameters[self.bucket[0]].count % self.sharding.ranks == 0
        size = sum(self._share(index) * self.sharding.ranks for index in self.bucket) * self.width
        copies = (not single) + (self.trace.device == "cpu")  # gloo reduces in a copy of its own
        if self.bucket and copies:
            self.book.passing(size * copies, "communication")
        if self.sharding.offload_optimizer:
            for index in self.bucket:  # a part is copied back to the device, and its norm taken, before it goes to the host
                norm = min(self._share(index), NORM_CHUNK) * NORM_BYTES
                self.book.passing(self._share(index) * self.width + norm, "workspaces")
        for number in self.oversized:
            self.give_up(number)
        self.oversized.clear()
        self.bucket.clear()
        self.filled = 0

    def _end_of_backward(self) -> None:
        if self._reduces:
            self._reduce()
            self._reduces = False
        self.gathering.end_backward()

    # A step.

    def optimizer_begins(self) -> None:
        self._end_of_backward()
        self.gathering.release_all()
        for number, group in enumerate(self.groups):
            if not self.sharding.offload_optimizer:
                self._step(number, group)
            elif number not in self.states:
                self.states[number] = -1
                self.host_bytes += self.optimizer.state_bytes(sum(self._share(index) for index in group), 4)
        self.gathering.gather_persistent()

    def _step(self, number: int, group: list[int]) -> None:
        count = sum(self._share(index) for index in group)
        if number == 0:
            for index in self.trained:
                self.book.passing(self._share(index) * NORM_BYTES, "workspaces")
        flat = self.book.allocate(count * self.width, "gradients")
        gradients = flat if self.width == 4 else self.book.allocate(count * 4, "gradients")
        if self.width != 4:
            self.book.free(flat)
        if number not in self.states:
            self.states[number] = self.book.allocate(self.optimizer.state_bytes(count, 4), "optimizer")
        self.book.passing(count * 4 * self.optimizer.temporary_copies, "optimizer")
        self.book.free(gradients)
