"""Attention of vision towers over many short pieces, traced as one operation for each length.

Without a flash-attention package, Qwen's towers split their patches by images and windows and call attention once for each
piece: several hundred calls per layer and pass for a batch of photographs. A trace needs as long for each call as for one
over all of them. Pieces of one length become the rows of a batch here: the same tensors, kept equally long, with the same
arithmetic.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def join_pieces(model: Any) -> None:
    """Let every attention that splits patches into pieces compute those of one length together."""
    for module in model.modules():
        if _takes_pieces(module) and not any(_takes_pieces(below) for below in module.modules() if below is not module):
            module.forward = partial(_joined, module.forward)


def _takes_pieces(module: Any) -> bool:
    return "cu_seqlens" in inspect.signature(module.forward).parameters  # places where the pieces begin


def _joined(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _ByLength():
        return forward(*arguments, **named)


class _ByLength(TorchFunctionMode):  # type: ignore[misc]
    """Splits (1, heads, tokens, width) by lengths into one batch (pieces, heads, length, width) for each
    length, and joins attention's results (pieces, length, heads, width) again.

    Which tokens share a piece changes, which no allocation depends on: values are not traced.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(named or {})
        if function is torch.split and len(arguments) == 2 and isinstance(arguments[1], list) and given.get("dim") == 2:
            pieces = Counter(arguments[1])
            parts = arguments[0].split([length * count for length, count in pieces.items()], dim=2)
            return tuple(
                part.unflatten(2, (count, length)).squeeze(0).transpose(0, 1)
                for part, (length, count) in zip(parts, pieces.items(), strict=True)
            )
        if function is torch.cat and given.get("dim") == 1:
            return torch.cat([one.reshape(1, -1, *one.shape[2:]) for one in arguments[0]], dim=1)
        return function(*arguments, **given)
