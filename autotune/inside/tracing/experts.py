"""Mixtures of experts: which expert a token goes to is data, so a balanced routing is followed, and the worst one as well.

transformers runs experts in several ways. With grouped or batched products every tensor has as many rows as there are pairs of
token and expert, whoever gets them: nothing is open. In the plain loop over experts each one takes the rows routed to it, and the
largest share decides what lives for a moment; there the interval goes from the balanced share to all tokens at the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import values
from .swap import torch_kernels

aten = torch.ops.aten

NOTE = "experts are taken to be loaded evenly; the upper end of the interval has every token at the same ones"


@contextmanager
def follow(model: Any, spec: Mapping[str, Any]) -> Iterator[None]:
    """Enter it last, inside fake mode and tracker: the router then chooses evenly, or with `"routing": "one"` always the same."""
    routers = routing_of(model)
    if routers is None:
        yield
        return
    with _grouped_products_of_any_type(), _Routing(*routers, even=spec.get("routing") != "one"):
        yield


def routing_of(model: Any) -> tuple[int, int] | None:
    """How many experts there are, and how many a token goes to; None for a dense model."""
    config = model.config.get_text_config()
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        count = getattr(config, name, None)
        if count:
            chosen = next(
                (getattr(config, key) for key in ("num_experts_per_tok", "moe_k", "top_k") if getattr(config, key, None)), 1
            )
            return int(count), int(chosen)
    return None


def depends_on_routing(model: Any) -> bool:
    """Whether memory hangs on where tokens go: then a second trace with `"routing": "one"` gives the upper end."""
    if routing_of(model) is None:
        return False
    return getattr(model.config.get_text_config(), "_experts_implementation", "eager") in (None, "eager")


def notes(model: Any) -> list[str]:
    return [NOTE] if depends_on_routing(model) else []


@contextmanager
def _grouped_products_of_any_type() -> Iterator[None]:
    """torch describes the grouped product without memory for bfloat16 alone; its kernels take the other types too."""
    known = getattr(torch._meta_registrations, "meta_grouped_mm", None)
    if known is None:
        yield
        return

    def described(left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        if left.dtype is torch.bfloat16:
            return known(left, right, offs, bias, out_dtype)
        groups = [right.shape[0]] if left.dim() == right.dim() == 3 else [offs.shape[0]] if left.dim() == right.dim() else []
        return torch.empty([*groups, left.shape[-2], right.shape[-1]], dtype=out_dtype or left.dtype, device=left.device)

    with torch_kernels(lambda library: library.impl("_grouped_mm", described, "Meta")):
        yield


class _Routing(TorchDispatchMode):  # type: ignore[misc]
    """Lets the router's choice be known. What follows from it (who is hit, which rows, how many each) then follows by itself."""

    def __init__(self, count: int, chosen: int, *, even: bool) -> None:
        super().__init__()
        self._count, self._chosen, self._even = count, chosen, even

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bincount.default:
            return self._counted(*args, **kwargs)
        if func is aten.nonzero.default and values.of(args[0]) is None and (found := self._found(args[0])) is not None:
            return found
        out = func(*args, **kwargs)
        if func is aten.topk.default and args[0].shape[-1] == self._count and out[1].shape[-1] == self._chosen:
            values.keep(out[1], self._choice(out[1].shape))
        elif func is aten.histc.default and out.numel() == self._count:
            values.keep(out, self._load(args[0].numel(), out.dtype))
        return out

    def _choice(self, shape: Any) -> Any:
        """Token by token, the experts it goes to."""
        with _disable_current_modes():
            places = (
                torch.arange(shape.numel()) if self._even else torch.arange(self._chosen).repeat(shape.numel() // self._chosen)
            )
            return (places % self._count).view(shape)

    def _load(self, pairs: int, dtype: torch.dtype) -> Any:
        """Expert by expert, how many rows it gets."""
        with _disable_current_modes():
            choice = self._choice(torch.Size([pairs // self._chosen, self._chosen]))
            return torch.bincount(choice.view(-1), minlength=self._count).to(dtype)

    def _counted(self, operand: Any, weights: Any = None, minlength: int = 0) -> Any:
        """A count per number: as many as asked for, since an expert's number is below that."""
        out = torch.empty(minlength, dtype=torch.long if weights is None else weights.dtype, device=operand.device)
        known = values.of(operand)
        if known is not None and weights is None:
            with _disable_current_modes():
                values.keep(out, torch.bincount(known, minlength=minlength))
        return out

    def _found(self, mask: Any) -> Any:
        """Where a mask that is too large to be known is set: who is hit, or an expert's rows."""
        if mask.numel() == self._count:
            length = self._count if self._even else self._chosen
            out = torch.empty((length, mask.dim()), dtype=torch.long, device=mask.device)
            with _disable_current_modes():
                places = torch.zeros((length, mask.dim()), dtype=torch.long)
                places[:, max(range(mask.dim()), key=lambda dim: mask.shape[dim])] = torch.arange(length)
                values.keep(out, places)
            return out
        if mask.dim() == 2 and mask.shape[0] == self._chosen:
            length = mask.numel() // self._count if self._even else mask.shape[1]
            return torch.empty((max(1, length), 2), dtype=torch.long, device=mask.device)
        return None
