"""Growth of a model's inventory, parameters and modules with further groups of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autotune.core.trace import Inventory, ModuleUse, Parameter, Trace
from autotune.estimate.screening.points import NotUniform
from autotune.estimate.screening.repetition import LayerRepetition

Modules = tuple[tuple[int, ...], ...]  # indices of the parameters that each module owns


def grown_inventory(
    short: Trace,
    longer: Trace,
    repetition: LayerRepetition,
) -> Inventory:
    """Return the full model's inventory.

    A sum over the model is I(L0) + c (I(L0 + p) - I(L0)).
    """
    first, second, copies = short.inventory, longer.inventory, repetition.copies
    end = repetition.first + repetition.period

    def total(name: str) -> int:
        base: int = getattr(first, name)
        difference: int = getattr(second, name) - base
        return base + copies * difference

    def by_layer(values: tuple[int, ...]) -> tuple[int, ...]:
        group = values[repetition.first : end]
        return (*values[:end], *(group * copies), *values[end:])

    return replace(
        first,
        parameters=total("parameters"),
        trainable_parameters=total("trainable_parameters"),
        weight_bytes=total("weight_bytes"),
        trainable_bytes=total("trainable_bytes"),
        statistics_bytes=total("statistics_bytes"),
        layer_bytes=by_layer(first.layer_bytes),
        layer_trainable=by_layer(first.layer_trainable),
        largest_parameter=max(first.largest_parameter, second.largest_parameter),
    )


class ParameterKind(NamedTuple):
    """Kind of a parameter: equal in all layers of one group instance."""

    number: int  # in its layer
    size: int
    is_outside: bool  # of the layers


def parameter_kinds(parameters: Sequence[Parameter]) -> Iterator[ParameterKind]:
    """Yield each parameter's kind."""
    numbers: Counter[int | None] = Counter()
    for parameter in parameters:
        yield ParameterKind(numbers[parameter.layer], parameter.size, parameter.layer is None)
        numbers[parameter.layer] += 1


def grown_parameters(
    short: ModuleUse,
    longer: ModuleUse,
    layers: Collection[int],
    copies: int,
) -> tuple[list[Parameter], Modules]:
    """Return parameters and modules with `copies` more of the longer model's last group.

    `layers`: those of that group. NotUniform unless their parameters follow each other.
    """
    # 1. The group's parameters: the last ones of its layers, as many as the short model lacks.
    count = len(longer.parameters) - len(short.parameters)
    places = [place for place, one in enumerate(longer.parameters) if one.layer in layers]
    end = 1 + max(places, default=-1)
    group = longer.parameters[end - count : end]
    # 2. Its modules: up to the last one that owns any of them.
    owners = [
        module
        for module, indices in enumerate(longer.modules)
        if any(end - count <= index < end for index in indices)
    ]
    in_order = end >= count and {parameter.layer for parameter in group} == set(layers)
    if not owners or not in_order:
        raise NotUniform("parameters are in another order")
    last = owners[-1] + 1
    module_count = len(longer.modules) - len(short.modules)
    group_modules = longer.modules[last - module_count : last]
    # 3. Repeat both. Later layers and parameters are numbered on.
    parameters = list(longer.parameters[:end])
    modules = list(longer.modules[:last])
    for copy in range(1, copies + 1):
        parameters += [_moved(parameter, copy * len(layers)) for parameter in group]
        modules += [tuple(index + copy * count for index in indices) for indices in group_modules]
    parameters += [_moved(one, copies * len(layers)) for one in longer.parameters[end:]]
    for indices in longer.modules[last:]:
        modules.append(
            tuple(index + copies * count if index >= end else index for index in indices)
        )
    return parameters, tuple(modules)


def _moved(parameter: Parameter, layers: int) -> Parameter:
    """Return the same parameter of a later layer."""
    if parameter.layer is None:
        return parameter
    return replace(parameter, layer=parameter.layer + layers)
