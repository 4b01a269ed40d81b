"""The parameters and modules of a long model, from those of a short one and of one that is a group of layers longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autotune.predict.pieces.blocks import NotUniform
from autotune.trace import Parameter, Usage


def kinds(parameters: Sequence[Parameter]) -> Iterator[tuple[int, int, bool]]:
    """The how-manieth of its layer, and its size; those outside of layers are told apart by both."""
    seen: dict[int | None, int] = defaultdict(int)
    for one in parameters:
        yield seen[one.layer], one.size, one.layer is None
        seen[one.layer] += 1


def grown(ours: Usage, theirs: Usage, inner: Collection[int], more: int) -> tuple[list[Parameter], tuple[tuple[int, ...], ...]]:
    """The parameters and modules of a model with so many more groups of layers than `theirs`; `inner` are one group's."""
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
