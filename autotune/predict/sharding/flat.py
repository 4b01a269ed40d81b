"""torch's own older ways: DDP's buckets, and FSDP1, whose units are flat parameters, one per decoder layer and one for the rest.

FSDP1's order follows torch/distributed/fsdp/_runtime_utils.py and _flat_param.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.predict.sharding.book import Optimizer, Rewriter, optimizer_of
from autotune.trace import Mark, Trace, Usage

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


class Fsdp1(Rewriter):
    """FULL_SHARD or SHARD_GRAD_OP, as accelerate wraps it: decoder layers, and a root with what is left."""

    def __init__(self, trace: Trace, usage: Usage, sharding: Sharding) -> None:
        super().__init__(trace, usage)
        self.sharding = sharding
        self.optimizer: Optimizer = optimizer_of(trace, usage)
        self.units: dict[tuple[int, bool], list[int]] = {}
        for index in range(len(usage.parameters)):
            self.units.setdefault((self._layer(index), self._apart(index)), []).append(index)
        self.open: dict[int, list[int]] = {}
        self.shards: dict[tuple[int, bool], int] = {}
        self.missing: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.states: list[int] = []
        self.layers = sorted({key for key, _ in self.units if key >= 0})
        self.announcers = self._announcers()
        self.current: int | None = None
        if trace.device == "cuda":
            self.gone |= {one.number for one in usage.parameters if one.number is not None and not self._ignored(one.trains)}

    def _layer(self, index: int) -> int:
        layer = self.usage.parameters[index].layer
        return -1 if layer is None else layer

    def _apart(self, index: int) -> bool:
        """A flat parameter trains as a whole or not at all: what trains among frozen weights is wrapped by itself."""
        return self.usage.parameters[index].trains

    def _ignored(self, trains: bool) -> bool:
        """Not FSDP's: whole on every rank, as the trace has it."""
        return trains and self.sharding.ignores_trainable

    def _announcers(self) -> dict[int, int]:
        """Layer -> the module whose backward brings the layer before it, where that is not the layer as a whole.

        What comes next is the unit that ran before. Where adapters are units of their own, before a layer's frozen part ran its
        last adapter, and only before its first adapter ran the layer below.
        """
        frozen = {layer for layer, trains in self.units if not trains}
        found: dict[int, int] = {}
        for module, held in enumerate(self.usage.modules):
            if held and self._apart(held[0]) and self._layer(held[0]) in frozen:
                found.setdefault(self._layer(held[0]), module)
        return {} if self.sharding.ignores_trainable else found

    def _count(self, unit: list[int]) -> int:
        count = sum(self.usage.parameters[index].count for index in unit)
        return -(-count // self.sharding.ranks) * self.sharding.ranks

    def _width(self, unit: list[int]) -> int:
        parameter = self.usage.parameters[unit[0]]
        return max(1, parameter.size // max(1, parameter.count))

    def _master_width(self, unit: list[int]) -> int:
        """What trains has masters of its own width; what is frozen is kept as it is gathered."""
        said = self.sharding.master_bytes if self._apart(unit[0]) else self.sharding.frozen_master_bytes
        return said or self._width(unit)

    def loaded(self) -> None:
        for (_, trains), unit in self.units.items():
            if self._ignored(trains):
                continue
            self.book.allocate(self._count(unit) // self.sharding.ranks * self._master_width(unit), "weights")
            for index in unit:
                self.give_up(self.usage.parameters[index].number)

    # Gathering.

    def _unshard(self, layer: int) -> None:
        if layer in self.open:
            return
        self.open[layer] = []
        for (where, trains), unit in self.units.items():
            if where != layer or self._ignored(trains):
                continue
            count, width = self._count(unit), self._width(unit)
            casts = self._master_width(unit) != width
            cast = self.book.allocate(count // self.sharding.ranks * width, "communication") if casts else None
            self.open[layer].append(self.book.allocate(count * width, "communication"))
            if self.trace.device == "cpu":  # gloo gathers into a buffer of its own first
                self.book.passing(count * width, "communication")
            self.book.free(cast)

    def _reshard(self, layer: int) -> None:
        for number in self.open.pop(layer, []):
            self.book.free(number)

    def pass_begins(self) -> None:
        self._finish_backward()
        self._unshard(-1)

    def forward_begins(self, module: int) -> None:
        self._reach(module)

    def backward_begins(self, module: int) -> None:
        self._reach(module)
        if self.current is not None and self.announcers.get(self.current) == module:
            self._prefetch(self.current)

    def _prefetch(self, layer: int) -> None:
        if self.phase == "backward" and self.sharding.prefetches_backward and layer > 0:
            self._unshard(layer - 1)

    def _reach(self, module: int) -> None:
        """The first module of a layer brings the layer."""
        if not self.usage.modules[module]:
            return
        layer = self._layer(self.usage.modules[module][0])
        if layer != self.current:
            self._leave()
        self.current = layer
        self._unshard(layer)
        if layer not in self.announcers:
            self._prefetch(layer)

    def _leave(self) -> None:
        """The root stays for backward; a layer's frozen part is cut again there when its inputs have their gradients."""
        if self.current is None or self.current < 0:
            return
        if self.phase == "backward" or self.sharding.reshards_after_forward:
            self._reshard(self.current)

    def _enter(self, mark: Mark) -> None:
        if self.phase != "backward" and mark.layer is None and self.current is not None and self.current >= 0:
            self._leave()
            self.current = None
        super()._enter(mark)

    # Gradients.

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        if self.sharding.ignores_trainable:
            if last:
                self._finish_backward()
            return
        layer = self._layer(parameter)
        held = self.held(number)
        self.seen[parameter] = -1 if held is None else held
        unit = self.units[layer, True]
        if all(index in self.seen for index in unit):
            self._reduce(layer, unit)
        if last:
            self._finish_backward()

    def _reduce(self, layer: int, unit: list[int]) -> None:
        """Gradients are put together flat, the layer is cut again, and the flat one is reduced into this rank's part."""
        count, width = self._count(unit), self._width(unit)
        flat = self.book.allocate(count * width, "gradients")
        for index in unit:
            self.give_up(self.seen.pop(index))
        self._reshard(layer)
        wide = self.sharding.reduce_bytes or width
        cast = self.book.allocate(count * wide, "communication") if wide != width else None
        part = self.book.allocate(count // self.sharding.ranks * wide, "gradients")
        if (layer, True) not in self.shards:
            master = self._master_width(unit)
            if master == wide:
                self.shards[layer, True] = part
            else:
                self.shards[layer, True] = self.book.allocate(count // self.sharding.ranks * master, "gradients")
                self.book.free(part)
        else:
            self.book.free(part)
        self.book.free(cast)
        self.book.free(flat)

    def _finish_backward(self) -> None:
        for layer in [layer for layer in self.open if self.phase in ("backward", "optimizer")]:
            self._reshard(layer)
        self.current = None

    # A step.

    def optimizer_begins(self) -> None:
        self._finish_backward()
        trained = [unit for (_, trains), unit in self.units.items() if trains]
        cut = 1 if self.sharding.ignores_trainable else self.sharding.ranks
        sizes = [(self._count(unit) // cut, self._master_width(unit)) for unit in trained]
        if not self.states:
            self.states = [self.book.allocate(self.optimizer.state_bytes(*size), "optimizer") for size in sizes]
        at_once = [count * width for count, width in sizes]
        size = sum(at_once) if self.optimizer.listed else max(at_once)
        self.book.passing(size * self.optimizer.temporary_copies, "optimizer")

    def optimizer_ends(self) -> None:
        """zero_grad sets gradients to None."""
        for number in self.shards.values():
            self.book.free(number)
        self.shards.clear()
