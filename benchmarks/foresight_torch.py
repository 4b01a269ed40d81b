"""Differences between the torch of a measurement and the installed torch that replaces it here."""

from __future__ import annotations

from typing import Any

import torch

EVERYTHING = 2**63 - 1
_plain = torch.Tensor.__getitem__


def full_slices(model: Any, spec: Any) -> None:
    """Copy full slices (the last of `x[..., :-1, :]`), as torch up to 2.8 does, each with its
    gradient.

    `applySlice` in ATen/TensorIndexing.h compared the length with the slice's end, and an end that
    is not given is the largest integer. Later releases skip such a slice.
    """
    torch.Tensor.__getitem__ = _piece_by_piece


def _piece_by_piece(tensor: Any, index: Any) -> Any:
    pieces = index if isinstance(index, tuple) else (index,)
    if not (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and all(_is_simple(piece) for piece in pieces)
    ):
        return _plain(tensor, index)
    missing = tensor.dim() - sum(piece is not None and piece is not Ellipsis for piece in pieces)
    dimension = 0
    for piece in pieces:
        if piece is Ellipsis:
            dimension += missing
        elif piece is None:
            tensor = tensor.unsqueeze(dimension)
            dimension += 1
        elif isinstance(piece, slice):
            stop = EVERYTHING if piece.stop is None else piece.stop
            tensor = torch.ops.aten.slice.Tensor(
                tensor, dimension, piece.start or 0, stop, piece.step or 1
            )
            dimension += 1
        else:
            tensor = tensor.select(dimension, piece)
    return tensor


def _is_simple(piece: Any) -> bool:
    return (
        piece is None
        or piece is Ellipsis
        or isinstance(piece, slice)
        or (isinstance(piece, int) and not isinstance(piece, bool))
    )
