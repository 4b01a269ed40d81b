"""What an operation takes and gives, walked through.

Only lists, tuples and dicts lie around its tensors, so torch's own walk, which looks every kind of node up, takes many times as
long; and a step asks for it tens of thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """In the order of torch's own walk."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def with_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_tensors(change, one) for one in value])
    if kind is dict:
        return {name: with_tensors(change, one) for name, one in value.items()}
    return value
