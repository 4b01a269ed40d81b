"""FSDP1's flat parameters: the units that are gathered together, and their sizes on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.core.trace import ModuleUse
from autotune.estimate.sharding.sharding_options import Sharding

UnitKey = tuple[int, int | None]
"""Layer (-1: the root), and the module if it is a unit of its own."""


class FlatParameters:
    """Units of accelerate: decoder layers, and a root (layer -1) with the rest."""

    def __init__(self, usage: ModuleUse, sharding: Sharding) -> None:
        self.usage, self.sharding = usage, sharding
        # Each parameter is in its layer's unit, or beside frozen parameters in its own module's: PEFT's wrapping policy
        # makes a unit of each module that has nothing but a trainable weight, so of each matrix of an adapter. Most of
        # these are in the allocator's pool of small blocks.
        frozen = {self.layer(index) for index, parameter in enumerate(usage.parameters) if not parameter.trains}
        owner = {index: module for module, held in enumerate(usage.modules) for index in held}
        self.unit_of: dict[int, UnitKey] = {
            index: (self.layer(index), owner.get(index) if parameter.trains and self.layer(index) in frozen else None)
            for index, parameter in enumerate(usage.parameters)
        }
        self.units: dict[UnitKey, list[int]] = {}
        for index, key in self.unit_of.items():
            self.units.setdefault(key, []).append(index)

    def layer(self, index: int) -> int:
        layer = self.usage.parameters[index].layer
        return -1 if layer is None else layer

    def trains(self, unit: Sequence[int]) -> bool:
        """Trainable and frozen parameters are flattened separately."""
        return self.usage.parameters[unit[0]].trains

    def ignored(self, trains: bool) -> bool:
        """Parameters outside FSDP are whole on every rank, as in the trace."""
        return trains and self.sharding.ignores_trainable

    def announcers(self) -> dict[int, int]:
        """Return layer -> module whose backward prefetches the layer below.

        Prefetched is the unit that ran before. If adapters are units of their own, a layer's frozen
        part runs after its last adapter, and only its first adapter runs after the layer below.
        """
        frozen = {layer for (layer, _), unit in self.units.items() if not self.trains(unit)}
        found: dict[int, int] = {}
        for module, held in enumerate(self.usage.modules):
            if held and self.trains(held) and self.layer(held[0]) in frozen:
                found.setdefault(self.layer(held[0]), module)
        return {} if self.sharding.ignores_trainable else found

    # Elements of a unit (padded), of a rank's shard, and bytes per element.

    def count(self, unit: list[int]) -> int:
        count = sum(self.usage.parameters[index].count for index in unit)
        return -(-count // self.sharding.ranks) * self.sharding.ranks

    def shard(self, unit: list[int]) -> int:
        return self.count(unit) // self.sharding.ranks

    def width(self, unit: list[int]) -> int:
        parameter = self.usage.parameters[unit[0]]
        return max(1, parameter.size // max(1, parameter.count))

    def master_width(self, unit: list[int]) -> int:
        stated = self.sharding.master_bytes if self.trains(unit) else self.sharding.frozen_master_bytes
        return stated or self.width(unit)

    def trained(self) -> Iterator[tuple[int, int, int]]:
        """Yield the optimizer's tensors: parameter, elements and width of this rank's piece."""
        for unit in self.units.values():
            for place, count in self._pieces(unit) if self.trains(unit) else ():
                yield place, count, self.master_width(unit)

    def _pieces(self, unit: list[int]) -> Iterator[tuple[int, int]]:
        """Yield this rank's piece of each original parameter, or of the flat one."""
        counts = [(index, self.usage.parameters[index].count) for index in unit]
        shard = self.shard(unit)
        if self.sharding.ignores_trainable:
            yield from counts
        elif not self.sharding.use_orig_params:
            yield unit[0], shard
        else:
            start, at = self.sharding.rank * shard, 0
            for index, count in counts:
                held = min(start + shard, at + count) - max(start, at)
                at += count
                if held > 0:
                    yield index, held
