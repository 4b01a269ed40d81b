"""Mixtures of experts: a balanced routing is traced, and the most unbalanced one too.

The expert of a token depends on data. transformers computes experts in several ways. With grouped
or batched products every tensor has a row per pair of token and expert, whatever the routing. In
the plain loop over experts each takes its own rows, and the largest share decides the peak; there
the interval extends from the balanced share to all tokens at the same experts.

Example: 4 tokens, 4 experts, 2 of them per token. Evenly routed, the tokens go to the experts
(0, 1), (2, 3), (0, 1), (2, 3), and each expert has 2 rows. At the other end all of them go to
(0, 1), and those two experts have 4 rows each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import Spec, integer_values
from .patching import all_entered, torch_kernels

aten = torch.ops.aten

NOTE = (
    "experts are assumed to be loaded evenly; at the upper end of the interval all tokens are"
    " routed to the same experts"
)


@all_entered
def routed(model: Any, spec: Spec) -> Iterator[AbstractContextManager[Any]]:
    """Route evenly, or with `"routing": "one"` always to the same experts. Enter it last."""
    routers = routing_of(model)
    if routers is not None:
        experts, experts_per_token = routers
        yield _grouped_products_of_all_types()
        yield _Routing(experts, experts_per_token, even=spec.get("routing") != "one")


def routing_of(model: Any) -> tuple[int, int] | None:
    """Return the number of experts, and of those per token; None for a dense model."""
    config = model.config.get_text_config()
    experts = _first_set(
        config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    if experts is None:
        return None
    per_token = _first_set(config, "num_experts_per_tok", "moe_k", "top_k")
    return int(experts), int(per_token or 1)


def _first_set(config: Any, *names: str) -> Any:
    """Return the first field that exists and is not zero; None without one."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def depends_on_routing(model: Any) -> bool:
    """Return True if memory depends on the routing, so that a second trace is needed."""
    text_config = model.config.get_text_config()
    implementation = getattr(text_config, "_experts_implementation", "eager")
    return routing_of(model) is not None and implementation in (None, "eager")


def extra_bytes(
    model: Any,
    annotator: Any,
    spec: Spec,
    again: Callable[[Spec], Any],
) -> int:
    """Return additional peak bytes if all tokens go to the same experts.

    `again` traces another specification and returns its annotator.
    """
    if spec.get("routing") == "one" or not depends_on_routing(model):
        return 0
    annotator.note(NOTE)
    worst = again({**spec, "routing": "one"})
    excess = worst.ledger.peak - annotator.ledger.peak
    return int(max(0, excess))


@all_entered
def _grouped_products_of_all_types() -> Iterator[AbstractContextManager[None]]:
    """Extend torch's meta kernel of the grouped product to types other than bfloat16."""
    kernel_of_torch = getattr(torch._meta_registrations, "meta_grouped_mm", None)
    if kernel_of_torch is None:
        return

    def grouped_product(
        left: Any,
        right: Any,
        offs: Any = None,
        bias: Any = None,
        out_dtype: Any = None,
    ) -> Any:
        if left.dtype is torch.bfloat16:
            return kernel_of_torch(left, right, offs, bias, out_dtype)
        shape = [left.shape[-2], right.shape[-1]]
        if left.dim() == right.dim() == 3:
            shape.insert(0, right.shape[0])
        elif left.dim() == right.dim():
            shape.insert(0, offs.shape[0])
        return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)

    # torch before 2.13 refuses a second Python kernel unless it is allowed by name.
    options: dict[str, Any] = {}
    parameters = inspect.signature(torch.library.Library.impl).parameters
    if "allow_override" in parameters:
        options["allow_override"] = True
    yield torch_kernels(
        lambda library: library.impl("_grouped_mm", grouped_product, "Meta", **options)
    )


class _Routing(TorchDispatchMode):  # type: ignore[misc]
    """Makes the router's choice known: indices, rows and counts then result from it."""

    def __init__(
        self,
        experts: int,
        experts_per_token: int,
        *,
        even: bool,
    ) -> None:
        super().__init__()
        self._experts = experts
        self._experts_per_token = experts_per_token
        self._even = even

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        # 1. Operations whose result has a shape that depends on the routing.
        if func is aten.bincount.default:
            return self._bincount(*args, **kwargs)
        if func is aten.nonzero.default and integer_values.of(args[0]) is None:
            positions = self._positions(args[0])
            if positions is not None:
                return positions

        # 2. Operations whose values are the routing.
        out = func(*args, **kwargs)
        if func is aten.topk.default:
            scores = args[0]
            indices = out[1]
            sizes = scores.shape[-1], indices.shape[-1]
            if sizes == (self._experts, self._experts_per_token):
                integer_values.keep(indices, self._choice(indices.shape))
        elif func is aten.histc.default and out.numel() == self._experts:
            integer_values.keep(out, self._rows_by_expert(args[0].numel(), out.dtype))
        return out

    def _choice(self, shape: Any) -> Any:
        """Return the experts of each token."""
        with _disable_current_modes():
            pairs = shape.numel()
            if self._even:
                order = torch.arange(pairs)
            else:
                first_experts = torch.arange(self._experts_per_token)
                order = first_experts.repeat(pairs // self._experts_per_token)
            return (order % self._experts).view(shape)

    def _rows_by_expert(self, pairs: int, dtype: torch.dtype) -> Any:
        """Return the number of rows of each expert."""
        with _disable_current_modes():
            tokens = pairs // self._experts_per_token
            choice = self._choice(torch.Size([tokens, self._experts_per_token]))
            return torch.bincount(choice.view(-1), minlength=self._experts).to(dtype)

    def _bincount(
        self,
        operand: Any,
        weights: Any = None,
        minlength: int = 0,
    ) -> Any:
        """Return counts of length `minlength`: an expert's number is below it."""
        dtype = torch.long if weights is None else weights.dtype
        counts = torch.empty(minlength, dtype=dtype, device=operand.device)
        real = integer_values.of(operand)
        if real is not None and weights is None:
            with _disable_current_modes():
                integer_values.keep(counts, torch.bincount(real, minlength=minlength))
        return counts

    def _positions(self, mask: Any) -> Any:
        """Return positions of a mask too large to be known: chosen experts, or an expert's rows."""
        if mask.numel() == self._experts:
            return self._positions_of_experts(mask)
        if mask.dim() == 2 and mask.shape[0] == self._experts_per_token:
            rows = mask.numel() // self._experts if self._even else mask.shape[1]
            shape = (max(1, rows), 2)
            return torch.empty(shape, dtype=torch.long, device=mask.device)
        return None

    def _positions_of_experts(self, mask: Any) -> Any:
        """Return the positions of the experts that have tokens; the longest dimension is theirs."""
        count = self._experts if self._even else self._experts_per_token
        shape = (count, mask.dim())
        positions = torch.empty(shape, dtype=torch.long, device=mask.device)
        with _disable_current_modes():
            values = torch.zeros(shape, dtype=torch.long)
            expert_dim = mask.shape.index(max(mask.shape))
            values[:, expert_dim] = torch.arange(count)
            integer_values.keep(positions, values)
        return positions
