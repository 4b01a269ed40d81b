"""torch's FSDP1: units are flat parameters, one per decoder layer and one for the rest, gathered and reduced on own streams.

The order, and which stream allocates what, follow torch/distributed/fsdp/_runtime_utils.py and _flat_param.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.predict.sharding.book import Optimizer, Rewriter, optimizer_of
from autotune.predict.sharding.limiter import Limiter
from autotune.trace import Mark, Part, Trace, Usage

if TYPE_CHECKING:
    from autotune.predict.sharding import Sharding


COMPUTING, GATHERING, CASTING, REDUCING = range(4)
"""torch's default, unshard, pre-unshard and post-backward streams."""

BROADCAST_BYTES = 250 << 20
"""From here on a bucket is sent when ranks are made alike; two are under way (`PARAM_BROADCAST_BUCKET_SIZE`)."""


def _buckets(sizes: list[int]) -> Iterator[int]:
    """What is flattened to be broadcast together."""
    filled = 0
    for size in sizes:
        filled += size
        if filled >= BROADCAST_BYTES:
            yield filled
            filled = 0
    if filled:
        yield filled


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
        self.narrow: dict[int, list[int]] = {}
        """Shards as they were before they were widened: original parameters are views of them until their unit is first cut."""

        self.seen: dict[int, int] = {}
        self.states: list[int] = []
        self.layers = sorted({key for key, _ in self.units if key >= 0})
        self.announcers = self._announcers()
        self.current: int | None = None
        self.recomputing: int | None = None
        """The layer whose forward pass is run again as a whole before its backward pass begins."""

        self.turned: int | None = None
        """The layer whose backward pass has begun."""

        self.again = False
        """Whether layers' forward passes are run again as a whole in this backward pass."""

        self.on_streams = trace.device == "cuda" and sharding.ranks > 1
        self.limiter = Limiter(self.book, on_streams=self.on_streams)
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
        """Units are wrapped from the inside out, the root last; then what trains is widened, unit by unit."""
        units = [key for key in self.units if not self._ignored(key[1])]
        shards = []
        for at, key in enumerate(sorted(units, key=lambda key: (key[0] < 0, key[0]))):
            self._arrive(at)
            shards.append(self._wrapped(self.units[key]))
            self.limiter.note()
        for number, unit in [shards[-1], *shards[:-1]]:
            if self._master_width(unit) != self._width(unit):
                self.book.allocate(self._shard(unit) * self._master_width(unit), "weights")
                self.narrow.setdefault(self._layer(unit[0]), []).append(number)
        for _, unit in [shards[-1], *shards[:-1]] if self.on_streams else ():
            self._prepared(unit)

    def _prepared(self, unit: list[int]) -> None:
        """Tensors to gather into are made once on the computing stream, and left empty (`init_flat_param_attributes`)."""
        width, master = self._width(unit), self._master_width(unit)
        if master != width:
            self.book.passing(self._shard(unit) * width, "communication")
        self.book.passing(self._count(unit) * width, "communication")
        if master != width:
            self.book.passing(self._count(unit) * master, "communication")

    def _arrive(self, unit: int) -> None:
        """How far the device is when a unit begins.

        Copying parameters from the host waits for it. Ranks that begin with parameters on meta copy nothing and run ahead of
        the broadcasts, by as much as the first rank's copies take longer than what all ranks do; taken as half the time.
        """
        if self.sharding.rank == 0 or not self.sharding.begins_on_meta:
            self.limiter.wait()
        elif unit % 2 == 0:
            self.limiter.next()

    def _wrapped(self, unit: list[int]) -> tuple[int, list[int]]:
        """Its parameters come to the device, from the host or empty; they are broadcast, put together flat, and cut."""
        parameters = [self.usage.parameters[index] for index in unit]
        whole = self.on_streams and self.sharding.synchronises
        moved = [self.book.allocate(parameter.size, "weights") for parameter in parameters] if whole else []
        for size in _buckets([parameter.size for parameter in parameters]) if whole else ():
            self.limiter.give_back(self.book.allocate(size, "communication"))
        flat = self.book.allocate(self._count(unit) * self._width(unit), "weights") if whole else None
        for number in moved:
            self.book.free(number)
        shard = self.book.allocate(self._shard(unit) * self._width(unit), "weights")
        self.book.free(flat)
        for parameter in parameters:
            self.give_up(parameter.number)
        return shard, unit

    def _shard(self, unit: list[int]) -> int:
        return self._count(unit) // self.sharding.ranks

    # Gathering.

    def _unshard(self, layer: int) -> None:
        if layer in self.open:
            return
        self.open[layer] = []
        for (where, trains), unit in self.units.items():
            if where == layer and not self._ignored(trains):
                self._gather(layer, unit)

    def _gather(self, layer: int, unit: list[int]) -> None:
        count, width = self._count(unit), self._width(unit)
        casts = self._master_width(unit) != width
        cast = self._allocate(count // self.sharding.ranks * width, "communication", CASTING) if casts else None
        self.limiter.before_gathering()
        self.open[layer].append(self._allocate(count * width, "communication", GATHERING))
        if self.trace.device == "cpu":  # gloo gathers into a buffer of its own first
            self.book.passing(count * width, "communication")
        self.limiter.give_back(cast)

    def _allocate(self, size: int, part: Part, stream: int) -> int:
        return self.book.allocate(size, part, stream if self.on_streams else COMPUTING)

    def _reshard(self, layer: int, *, read_elsewhere: bool = True) -> None:
        for number in self.narrow.pop(layer, []) if layer in self.open else ():
            self.book.free(number)
        for number in self.open.pop(layer, []):
            if read_elsewhere:
                self.limiter.give_back(number)
            else:
                self.book.free(number)
            self.limiter.note()

    def pass_begins(self) -> None:
        self._finish_backward()
        self.limiter.wait()
        self._unshard(-1)

    def forward_begins(self, module: int) -> None:
        layer = self._reach(module)
        if self.phase == "backward" and layer is not None and layer >= 0 and self.turned != layer:
            self.recomputing = layer

    def backward_begins(self, module: int) -> None:
        layer = self._reach(module)
        if layer is None:
            return
        if layer == self.recomputing:
            self._turn_round(layer)
        elif self.announcers.get(layer, module if self.turned != layer else None) == module:
            self._prefetch(layer)
        self.recomputing, self.turned = None, layer

    def _turn_round(self, layer: int) -> None:
        """Its forward pass was run again as a whole: FSDP cuts it there, and gathers it anew for its backward pass.

        Nothing comes ahead then: a unit is only fetched once it has an output that wants a gradient
        (`_needs_pre_backward_unshard`), which the layer below gets when its own forward pass is run again.
        """
        self.again = True
        if self.sharding.reshards_after_forward:
            self._reshard(layer)
            self._unshard(layer)

    def _prefetch(self, layer: int) -> None:
        """The layer below comes when this one's backward pass begins."""
        if self.phase == "backward" and self.sharding.prefetches_backward and layer > 0 and not self.again:
            self._unshard(layer - 1)

    def _reach(self, module: int) -> int | None:
        """The first module of a layer brings the layer."""
        if not self.usage.modules[module]:
            return None
        layer = self._layer(self.usage.modules[module][0])
        if layer != self.current:
            self._leave()
        self.current = layer
        self._unshard(layer)
        return layer

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
        """Gradients are put together flat, the layer is cut again, and the flat one is reduced into this rank's part.

        autograd runs a node on the stream that its forward was made on. A unit is split into its parameters where it is gathered,
        so that is where its gradients are put together, and where the unit is cut again after that: what the computation made
        is read by another stream, what was gathered is not.
        """
        count, width, master = self._count(unit), self._width(unit), self._master_width(unit)
        wide = self.sharding.reduce_bytes or width
        flat = self._allocate(count * width, "gradients", GATHERING)
        for index in unit:
            number = self.seen.pop(index)
            if self.gives_up(number):
                self.limiter.give_back(number)
        self._reshard(layer, read_elsewhere=False)
        cast = self._allocate(count * wide, "communication", REDUCING) if wide != width else None
        part = self._allocate(count // self.sharding.ranks * wide, "gradients", REDUCING)
        if (layer, True) in self.shards:
            self.limiter.give_back(part)
        elif master == wide:
            self.shards[layer, True] = part
        else:
            self.shards[layer, True] = self._allocate(count // self.sharding.ranks * master, "gradients", REDUCING)
            self.limiter.give_back(part)
        self.limiter.give_back(cast)
        self.limiter.give_back(flat)

    def _finish_backward(self) -> None:
        for layer in [layer for layer in self.open if self.phase in ("backward", "optimizer")]:
            self._reshard(layer)
        self.current = self.recomputing = self.turned = None
        self.again = False

    # A step.

    def optimizer_begins(self) -> None:
        self._finish_backward()
        self.limiter.wait()
        sizes = [(count, width) for _, count, width in sorted(self._trained())]
        if not self.states:
            kept = [one for size in sizes for one in self.optimizer.state_tensors(*size)]
            self.states = [self.book.allocate(size, "optimizer") for size in kept]
        if not self.optimizer.listed:
            largest = max(count * width for count, width in sizes)
            self.book.passing(largest * self.optimizer.temporary_copies, "optimizer")
            return
        copies = [count * width for _ in range(self.optimizer.temporary_copies) for count, width in sizes]
        for number in [self.book.allocate(size, "optimizer") for size in copies]:
            self.book.free(number)

    def _trained(self) -> Iterator[tuple[int, int, int]]:
        """What the optimizer sees: the place of a parameter, and elements and width of this rank's piece of it."""
        for (_, trains), unit in self.units.items():
            for place, count in self._pieces(unit) if trains else ():
                yield place, count, self._master_width(unit)

    def _pieces(self, unit: list[int]) -> Iterator[tuple[int, int]]:
        """Of each original parameter (`use_orig_params`), or of the flat one as a whole."""
        counts = [(index, self.usage.parameters[index].count) for index in unit]
        if self.sharding.ignores_trainable:
            yield from counts
            return
        shard = self._shard(unit)
        if not self.sharding.uses_original_parameters:
            yield unit[0], shard
            return
        start, at = self.sharding.rank * shard, 0
        for index, count in counts:
            held = min(start + shard, at + count) - max(start, at)
            at += count
            if held > 0:
                yield index, held

    def optimizer_ends(self) -> None:
        """zero_grad sets gradients to None."""
        for number in self.shards.values():
            self.book.free(number)
        self.shards.clear()
