"""torch's FSDP1: flat parameters by decoder layer, gathered and reduced on own streams.

The order of allocations and their streams is that of torch/distributed/fsdp/_runtime_utils.py and
_flat_param.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.trace import Mark, ModuleUse, Part, Trace
from autotune.estimate.sharding.flat_parameters import FlatParameters, UnitKey
from autotune.estimate.sharding.rate_limiter import RateLimiter
from autotune.estimate.sharding.rewriter import BACKWARD, FORWARD, PASS, Rewriter, optimizer_of
from autotune.estimate.sharding.sharding_options import Sharding
from autotune.worker.releases import release_numbers

COMPUTING, GATHERING, CASTING, REDUCING = range(4)
"""torch's default, unshard, pre-unshard and post-backward streams."""

BROADCAST_BYTES = 250 << 20
"""Bytes of one initial broadcast; two are in flight (`PARAM_BROADCAST_BUCKET_SIZE`)."""

STASHES_FROM = (2, 8)
"""First torch whose collectives hold their tensors until they are waited for, instead of marking them by `record_stream`."""


class Fsdp1(Rewriter):
    """Flat parameters, gathered before their use and reduced after their gradients."""

    def __init__(self, trace: Trace, usage: ModuleUse, sharding: Sharding) -> None:
        super().__init__(trace, usage, sharding)
        self.optimizer = optimizer_of(trace, usage)
        self.flat = FlatParameters(usage, sharding)
        self.units = self.flat.units
        self.own = {key[1]: key for key in self.units if key[1] is not None}  # module -> its own unit
        self.open: dict[int, list[int]] = {}  # layer -> gathered blocks, without units of its modules
        self.apart: dict[UnitKey, int] = {}  # the same of those
        self.shards: dict[UnitKey, int] = {}
        # Shards before widening: parameters are views of them until the first reshard.
        self.narrow: dict[int, list[int]] = {}
        self.seen: dict[int, int] = {}
        self.states: list[int] = []
        self.announcers = self.flat.announcers()
        self.current: int | None = None
        self.recomputing: int | None = None  # layer whose whole forward pass runs again before its backward pass
        self.turned: int | None = None  # layer whose backward pass has begun
        self.recomputes = self._recomputes_whole()  # layers recompute their whole forward pass in a backward pass
        self.on_streams = trace.device == "cuda" and sharding.ranks > 1
        self.records_streams = sharding.records_streams or release_numbers(trace.versions.get("torch", "")) < STASHES_FROM
        self.limiter = RateLimiter(self.book, on_streams=self.on_streams)
        if trace.device == "cuda":
            self.gone |= {one.number for one in usage.parameters if one.number is not None and not self.flat.ignored(one.trains)}

    def _recomputes_whole(self) -> bool:
        """Return True for reentrant checkpointing: a layer's forward pass is repeated before its backward pass begins."""
        turned: set[int] = set()
        backward = False
        for _, kind, which, *_ in self.usage.uses:
            if kind == PASS:
                backward = False
                turned.clear()
            if kind not in (FORWARD, BACKWARD) or not self.usage.modules[which]:
                continue
            layer = self.flat.layer(self.usage.modules[which][0])
            if kind == BACKWARD:
                backward = True
                turned.add(layer)
            elif backward and layer >= 0 and layer not in turned:
                return True
        return False

    # Load.

    def loaded(self) -> None:
        """Wrap units from the inside out, the root last; then widen the trainable ones."""
        units = [key for key, unit in self.units.items() if not self.flat.ignored(self.flat.trains(unit))]
        shards = []
        for at, key in enumerate(sorted(units, key=lambda key: (key[0] < 0, key[0]))):
            # Copies from the host wait for the device. Ranks that begin on meta copy nothing and run ahead of the
            # broadcasts: assumed half of the time.
            if self.sharding.rank == 0 or not self.sharding.begins_on_meta:
                self.limiter.synchronise()
            elif at % 2 == 0:
                self.limiter.wait_for_oldest()
            shards.append(self._wrapped(self.units[key]))
            self.limiter.record_event()
        root_first = [shards[-1], *shards[:-1]]
        for number, unit in root_first:
            if self.flat.master_width(unit) != self.flat.width(unit):
                self.book.allocate(self.flat.shard(unit) * self.flat.master_width(unit), "weights")
                self.narrow.setdefault(self.flat.layer(unit[0]), []).append(number)
        for _, unit in root_first if self.on_streams else ():
            # Gather buffers are made and freed once (`init_flat_param_attributes`).
            count, width, master = self.flat.count(unit), self.flat.width(unit), self.flat.master_width(unit)
            casts = master != width
            for size in (self.flat.shard(unit) * width, count * width, count * master) if casts else (count * width,):
                self.book.passing(size, "communication")

    def _wrapped(self, unit: list[int]) -> tuple[int, list[int]]:
        """Move a unit to the device (copied or empty), broadcast, flatten and shard it."""
        parameters = [self.usage.parameters[index] for index in unit]
        whole = self.on_streams and self.sharding.sync_module_states
        moved = [self.book.allocate(parameter.size, "weights") for parameter in parameters] if whole else []
        for size in _broadcasts([parameter.size for parameter in parameters]) if whole else ():
            (self.limiter if self.records_streams else self.book).free(self.book.allocate(size, "communication"))
        flat = self.book.allocate(self.flat.count(unit) * self.flat.width(unit), "weights") if whole else None
        shard = self.book.allocate(self.flat.shard(unit) * self.flat.width(unit), "weights")
        self.book.free(flat)
        for number in moved:  # `_init_param_handle_from_module` lists them until the flat parameter is sharded
            self.book.free(number)
        for parameter in parameters:
            self.give_up(parameter.number)
        return shard, unit

    # Gathering.

    def _unshard(self, layer: int) -> None:
        if layer in self.open:
            return
        self.open[layer] = []
        for (where, module), unit in self.units.items():
            if where == layer and module is None and not self.flat.ignored(self.flat.trains(unit)):
                self.open[layer].append(self._gathered(unit))

    def _unshard_own(self, module: int) -> None:
        key = self.own.get(module)
        if key is not None and key not in self.apart and not self.flat.ignored(self.flat.trains(self.units[key])):
            self.apart[key] = self._gathered(self.units[key])

    def _gathered(self, unit: list[int]) -> int:
        count, width = self.flat.count(unit), self.flat.width(unit)
        casts = self.flat.master_width(unit) != width
        cast = self._allocate(count // self.sharding.ranks * width, "communication", CASTING) if casts else None
        self.limiter.before_gathering()
        whole = self._allocate(count * width, "communication", GATHERING)
        if self.trace.device == "cpu":  # gloo gathers into a buffer of its own first
            self.book.passing(count * width, "communication")
        self.limiter.free(cast)
        return whole

    def _allocate(self, size: int, part: Part, stream: int) -> int:
        return self.book.allocate(size, part, stream if self.on_streams else COMPUTING)

    def _reshard(self, layer: int, *, read_elsewhere: bool = True) -> None:
        for number in self.narrow.pop(layer, []) if layer in self.open else ():
            self.book.free(number)
        for number in self.open.pop(layer, []):
            self._free(number, read_elsewhere=read_elsewhere)

    def _reshard_own(self, key: UnitKey, *, read_elsewhere: bool = True) -> None:
        if key in self.apart:
            self._free(self.apart.pop(key), read_elsewhere=read_elsewhere)

    def _free(self, number: int, *, read_elsewhere: bool) -> None:
        if read_elsewhere:
            self.limiter.free(number)
        else:
            self.book.free(number)
        self.limiter.record_event()

    def pass_begins(self, module: int) -> None:
        self._finish_backward()
        # Nothing waits for the device between two steps: a frozen root's buffer of the step before, which the final
        # callback freed on torch's default stream, is still in use. Public A100 rows with adapters have both.
        self._unshard(-1)
        self.limiter.synchronise()

    def forward_begins(self, module: int) -> None:
        layer = self._reach(module)
        if self.phase == "backward" and layer is not None and layer >= 0 and self.turned != layer:
            self.recomputing = layer
        self._unshard_own(module)

    def forward_ends(self, module: int) -> None:
        if module in self.own and self.sharding.reshards_after_forward:
            self._reshard_own(self.own[module])

    def backward_begins(self, module: int) -> None:
        if module == 0 and not self.usage.modules[0] and self._prefetches():
            # The root's own hook: the unit that ran before it is the last layer.
            self._unshard(-1)
            self._unshard(max(layer for layer, _ in self.units))
        layer = self._reach(module)
        self._unshard_own(module)
        if layer is None:
            return
        if layer == self.recomputing:
            # FSDP reshards after the recomputed forward pass and gathers anew. No prefetch: a unit needs an output with
            # a gradient (`_needs_pre_backward_unshard`), and the layer below has none until its own forward runs again.
            if self.sharding.reshards_after_forward:
                self._reshard(layer)
                self._unshard(layer)
        elif self.announcers.get(layer, module if self.turned != layer else None) == module and self._prefetches() and layer > 0:
            self._unshard(layer - 1)
        self.recomputing, self.turned = None, layer

    def _prefetches(self) -> bool:
        return self.phase == "backward" and self.sharding.prefetches_backward and not self.recomputes

    def _reach(self, module: int) -> int | None:
        """Gather the layer of this module, if it is the layer's first."""
        if not self.usage.modules[module]:
            return None
        layer = self.flat.layer(self.usage.modules[module][0])
        if layer != self.current:
            self._leave()
        self.current = layer
        self._unshard(layer)
        return layer

    def _leave(self) -> None:
        """Reshard the current layer; the root stays gathered for the backward pass."""
        stays = self.phase != "backward" and not self.sharding.reshards_after_forward
        if self.current is not None and self.current >= 0 and not stays:
            self._reshard(self.current)

    def _enter(self, mark: Mark) -> None:
        if self.phase == "backward" != mark.phase:  # not after the last gradient: frozen layers may come after it
            self.limiter.synchronise()  # all but what the final callback frees
            self._finish_backward()
        if self.phase != "backward" and mark.layer is None and self.current is not None and self.current >= 0:
            self._leave()
            self.current = None
        super()._enter(mark)

    # Gradients.

    def gradient(self, parameter: int, number: int, *, last: bool) -> None:
        if not self.sharding.ignores_trainable:
            held = self.held(number)
            self.seen[parameter] = -1 if held is None else held
            key = self.flat.unit_of[parameter]
            if all(index in self.seen for index in self.units[key]):
                self._reduce(key)

    def _reduce(self, key: UnitKey) -> None:
        """Flatten the gradients, reshard the layer, reduce into this rank's part.

        autograd runs a node on the stream of its forward. A unit is split into parameters on the gathering stream, so its
        gradients are flattened and the unit is resharded there: gradients are read by another stream, gathered weights are not.
        """
        unit = self.units[key]
        count, width, master = self.flat.count(unit), self.flat.width(unit), self.flat.master_width(unit)
        wide = self.sharding.reduce_bytes or width
        flat = self._allocate(count * width, "gradients", GATHERING)
        for index in unit:
            number = self.seen.pop(index)
            if self.gives_up(number):
                self.limiter.free(number)
        if key[1] is not None:  # its frozen layer is resharded when the gradients of its inputs are ready
            self._reshard_own(key, read_elsewhere=False)
        else:
            self._reshard(key[0], read_elsewhere=False)
        cast = self._allocate(count * wide, "communication", REDUCING) if wide != width else None
        part = self._allocate(count // self.sharding.ranks * wide, "gradients", REDUCING)
        if key in self.shards:
            self.limiter.free(part)
        elif master == wide:
            self.shards[key] = part
        else:
            self.shards[key] = self._allocate(count // self.sharding.ranks * master, "gradients", REDUCING)
            self.limiter.free(part)
        self.limiter.free(cast)
        self.limiter.free(flat)

    def _finish_backward(self) -> None:
        for key in list(self.apart) if self.phase in ("backward", "optimizer") else ():
            self._reshard_own(key)
        for layer in [layer for layer in self.open if self.phase in ("backward", "optimizer")]:
            self._reshard(layer)
        self.current = self.recomputing = self.turned = None

    # Optimizer step.

    def optimizer_begins(self) -> None:
        self._finish_backward()
        sizes = [(count, width) for _, count, width in sorted(self.flat.trained())]
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

    def optimizer_ends(self) -> None:
        """Free the gradients: zero_grad sets them to None."""
        for number in self.shards.values():
            self.book.free(number)
        self.shards.clear()


def _broadcasts(sizes: list[int]) -> Iterator[int]:
    """Yield the copies that are broadcast: of tensors that fill a bucket together. One that fills it alone is sent itself."""
    bucket: list[int] = []
    for at, size in enumerate(sizes):
        bucket.append(size)
        if sum(bucket) >= BROADCAST_BYTES or at == len(sizes) - 1:
            if len(bucket) > 1:
                yield sum(bucket)
            bucket = []
