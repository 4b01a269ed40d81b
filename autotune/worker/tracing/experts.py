"""Mixtures of experts: a balanced routing is traced, and the most unbalanced one too.

The expert of a token depends on data. transformers computes experts in several ways. With grouped
or batched products every tensor has a row per pair of token and expert, whatever the routing. In
the plain loop over experts each takes its own rows, and the largest share decides the peak; there
the interval extends from the balanced share to all tokens at the same experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import integer_values
from .patching import all_entered, torch_kernels

aten = torch.ops.aten

NOTE = (
    "experts are assumed to be loaded evenly; at the upper end of the interval all tokens are"
    " routed to the same experts"
)


@all_entered
def routed(model: Any, spec: Mapping[str, Any]) -> Iterator[AbstractContextManager[Any]]:
    """Route evenly, or with `"routing": "one"` always to the same experts. Enter it last."""
    if routers := routing_of(model):
        yield _grouped_products_of_all_types()
        yield _Routing(*routers, even=spec.get("routing") != "one")


def routing_of(model: Any) -> tuple[int, int] | None:
    """Return the number of experts, and of those per token; None for a dense model."""
    config = model.config.get_text_config()

    def first(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    count = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return (int(count), int(first("num_experts_per_tok", "moe_k", "top_k") or 1)) if count else None


def depends_on_routing(model: Any) -> bool:
    """Return True if memory depends on the routing, so that a second trace is needed."""
    implementation = getattr(model.config.get_text_config(), "_experts_implementation", "eager")
    return routing_of(model) is not None and implementation in (None, "eager")


def extra_bytes(
    model: Any, annotator: Any, spec: Mapping[str, Any], again: Callable[[Mapping[str, Any]], Any]
) -> int:
    """Return additional peak bytes if all tokens go to the same experts. `again` returns a
    trace's annotator.
    """
    if spec.get("routing") == "one" or not depends_on_routing(model):
        return 0
    annotator.note(NOTE)
    worst = again({**spec, "routing": "one"})
    return int(max(0, worst.ledger.peak - annotator.ledger.peak))


@all_entered
def _grouped_products_of_all_types() -> Iterator[AbstractContextManager[None]]:
    """Extend torch's meta kernel of the grouped product to types other than bfloat16."""
    known = getattr(torch._meta_registrations, "meta_grouped_mm", None)
    if known is None:
        return

    def described(
        left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        if left.dtype is torch.bfloat16:
            return known(left, right, offs, bias, out_dtype)
        groups = (
            [right.shape[0]]
            if left.dim() == right.dim() == 3
            else [offs.shape[0]]
            if left.dim() == right.dim()
            else []
        )
        return torch.empty(
            [*groups, left.shape[-2], right.shape[-1]],
            dtype=out_dtype or left.dtype,
            device=left.device,
        )

    # torch before 2.13 refuses a second Python kernel, unless told.
    known_to_impl = inspect.signature(torch.library.Library.impl).parameters
    override = {"allow_override": True} if "allow_override" in known_to_impl else {}
    yield torch_kernels(lambda library: library.impl("_grouped_mm", described, "Meta", **override))


class _Routing(TorchDispatchMode):  # type: ignore[misc]
    """Makes the router's choice known: indices, rows and counts then result from it."""

    def __init__(self, count: int, chosen: int, *, even: bool) -> None:
        super().__init__()
        self._count, self._chosen, self._even = count, chosen, even

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bincount.default:
            return self._counted(*args, **kwargs)
        unknown = func is aten.nonzero.default and integer_values.of(args[0]) is None
        if unknown and (found := self._positions(args[0])) is not None:
            return found
        out = func(*args, **kwargs)
        if (
            func is aten.topk.default
            and args[0].shape[-1] == self._count
            and out[1].shape[-1] == self._chosen
        ):
            integer_values.keep(out[1], self._choice(out[1].shape))
        elif func is aten.histc.default and out.numel() == self._count:
            integer_values.keep(out, self._load(args[0].numel(), out.dtype))
        return out

    def _choice(self, shape: Any) -> Any:
        """Return the experts of each token."""
        with _disable_current_modes():
            count = shape.numel()
            places = (
                torch.arange(count)
                if self._even
                else torch.arange(self._chosen).repeat(count // self._chosen)
            )
            return (places % self._count).view(shape)

    def _load(self, pairs: int, dtype: torch.dtype) -> Any:
        """Return the number of rows of each expert."""
        with _disable_current_modes():
            choice = self._choice(torch.Size([pairs // self._chosen, self._chosen]))
            return torch.bincount(choice.view(-1), minlength=self._count).to(dtype)

    def _counted(self, operand: Any, weights: Any = None, minlength: int = 0) -> Any:
        """Return counts of length `minlength`: an expert's number is below it."""
        out = torch.empty(
            minlength, dtype=torch.long if weights is None else weights.dtype, device=operand.device
        )
        known = integer_values.of(operand)
        if known is not None and weights is None:
            with _disable_current_modes():
                integer_values.keep(out, torch.bincount(known, minlength=minlength))
        return out

    def _positions(self, mask: Any) -> Any:
        """Return positions of a mask too large to be known: chosen experts, or an expert's rows."""
        if mask.numel() == self._count:
            length = self._count if self._even else self._chosen
            out = torch.empty((length, mask.dim()), dtype=torch.long, device=mask.device)
            with _disable_current_modes():
                places = torch.zeros((length, mask.dim()), dtype=torch.long)
                places[:, max(range(mask.dim()), key=lambda dim: mask.shape[dim])] = torch.arange(
                    length
                )
                integer_values.keep(out, places)
            return out
        if mask.dim() == 2 and mask.shape[0] == self._chosen:
            length = mask.numel() // self._count if self._even else mask.shape[1]
            return torch.empty((max(1, length), 2), dtype=torch.long, device=mask.device)
        return None
