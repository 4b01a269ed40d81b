"""Growth of a model by groups of layers: blocks, parameters, modules, inventory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autotune.core.trace import Inventory, ModuleUse, Parameter, Trace
from autotune.estimate.screening.blocks import BlockKey, NotUniform


@dataclass(frozen=True, kw_only=True)
class LayerRepetition:
    """Repetition of layers `first` to `first + period - 1`, `copies` times."""

    layers: int  # layers of the short model
    first: int
    period: int
    copies: int

    def order(self, keys: Sequence[BlockKey]) -> Iterator[tuple[int, bool]]:
        """Yield places in `keys` in the long model's order; True for a repetition."""
        group: list[int] = []
        for place, key in enumerate(keys):
            layer = key.last_layer
            inside = layer is not None and self.first <= layer < self.first + self.period
            if group and not (inside and keys[group[-1]].stay == key.stay):
                yield from ((one, True) for one in group * self.copies)
                group = []
            if inside:
                group.append(place)
            yield place, False
        yield from ((one, True) for one in group * self.copies)


def numbered(order: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """Yield each place with the number of its earlier occurrences."""
    seen: dict[int, int] = defaultdict(int)
    for place, _ in order:
        yield place, seen[place]
        seen[place] += 1


def falling(keys: Sequence[BlockKey]) -> set[int]:
    """Return the blocks in stays that run the layers from last to first (the backward pass)."""
    found: set[int] = set()
    for _, several in groupby(enumerate(keys), lambda one: one[1].stay):
        before: int | None = None
        latest: int | None = None
        for place, key in several:
            layer = key.last_layer
            if layer != latest and layer is not None:
                before, latest = latest, layer
            if layer is not None and before is not None and before > layer:
                found.add(place)
    return found


def parameter_kinds(parameters: Sequence[Parameter]) -> Iterator[tuple[int, int, bool]]:
    """Yield number within the layer, size, and True for parameters outside of layers."""
    seen: dict[int | None, int] = defaultdict(int)
    for one in parameters:
        yield seen[one.layer], one.size, one.layer is None
        seen[one.layer] += 1


def grown_parameters(
    ours: ModuleUse, theirs: ModuleUse, inner: Collection[int], more: int
) -> tuple[list[Parameter], tuple[tuple[int, ...], ...]]:
    """Return parameters and modules with `more` additional groups; `inner`: layers of one group."""
    each, modules = len(theirs.parameters) - len(ours.parameters), len(theirs.modules) - len(ours.modules)
    ends = 1 + max((at for at, one in enumerate(theirs.parameters) if one.layer in inner), default=-1)
    held = [at for at, several in enumerate(theirs.modules) if any(ends - each <= one < ends for one in several)]
    if ends < each or not held or {one.layer for one in theirs.parameters[ends - each : ends]} != set(inner):
        raise NotUniform("parameters are in another order")

    def later(one: Parameter, groups: int) -> Parameter:
        return replace(one, layer=None if one.layer is None else one.layer + groups * len(inner))

    group = theirs.parameters[ends - each : ends]
    parameters = [
        *theirs.parameters[:ends],
        *(later(one, copy) for copy in range(1, more + 1) for one in group),
        *(later(one, more) for one in theirs.parameters[ends:]),
    ]
    last = held[-1] + 1
    repeated = theirs.modules[last - modules : last]
    return parameters, (
        *theirs.modules[:last],
        *(tuple(one + copy * each for one in several) for copy in range(1, more + 1) for several in repeated),
        *(tuple(one if one < ends else one + more * each for one in several) for several in theirs.modules[last:]),
    )


def grown_inventory(short: Trace, longer: Trace | None, repetition: LayerRepetition) -> Inventory:
    """Return the long model's inventory."""
    if longer is None or not repetition.copies:
        return short.inventory
    one, two, copies = short.inventory, longer.inventory, repetition.copies
    group = slice(repetition.first, repetition.first + repetition.period)

    def repeated(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (*layers[: group.stop], *(layers[group] * copies), *layers[group.stop :])

    linear = ("parameters", "trainable_parameters", "weight_bytes", "trainable_bytes", "statistics_bytes")
    grown = {name: getattr(one, name) + copies * (getattr(two, name) - getattr(one, name)) for name in linear}
    return replace(
        one,
        **{name: int(value) for name, value in grown.items()},
        layer_bytes=repeated(one.layer_bytes),
        layer_trainable=repeated(one.layer_trainable),
        largest_parameter=max(one.largest_parameter, two.largest_parameter),
    )
