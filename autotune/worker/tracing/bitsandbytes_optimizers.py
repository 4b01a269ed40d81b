"""bitsandbytes' optimizers without a GPU: size and place of their state; nothing is computed.

As in `bitsandbytes/optim/optimizer.py`: two moments (one for Lion and RMSprop, three for AdEMAMix)
in float32, or in 8 bits with a float32 scale per 256 numbers for parameters of at least 4,096
numbers; embeddings stay in 32 bits if transformers requests it. Large moments of a paged optimizer
are in managed memory, invisible to torch's allocator: they are on meta here.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .patching import all_entered, attribute, swapped

STATE_BLOCK = 256
"""Numbers per scale."""
SMALLEST_8BIT = 4096
SMALLEST_PAGED = 100_000


# 1. The optimizers.


class _Manager:
    """`GlobalOptimManager`: parameters with another width of state."""

    _only: _Manager | None = None

    def __init__(self) -> None:
        self.overrides: list[tuple[Any, str, dict[str, Any]]] = []

    @classmethod
    def get_instance(cls) -> _Manager:
        cls._only = cls._only or cls()
        return cls._only

    def register_module_override(
        self,
        module: Any,
        name: str,
        config: dict[str, Any],
    ) -> None:
        self.overrides.append((module, name, config))

    def bits_of(self, parameter: Any, bits: int) -> int:
        for module, name, config in self.overrides:
            if getattr(module, name, None) is parameter:
                return int(config.get("optim_bits", bits))
        return bits


class _StateOnly(torch.optim.Optimizer):  # type: ignore[misc]
    """Allocates its state at the first step, as the real one does; parameters do not change."""

    moments = 2
    bits_by_default = 32
    paged_by_default = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *_: Any,
        optim_bits: int | None = None,
        is_paged: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.bits = optim_bits or self.bits_by_default
        self.paged = self.paged_by_default if is_paged is None else is_paged
        self.managed_bytes = 0
        """Bytes of the state in managed memory."""
        weight_decay = kwargs.get("weight_decay", 0.0)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._make_state(parameter)
                if not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()
        return None

    def _make_state(self, parameter: Any) -> None:
        state = self.state[parameter]
        count = parameter.numel()
        manager = _Manager.get_instance()
        bits = manager.bits_of(parameter, self.bits)
        in_8bit = count >= SMALLEST_8BIT and bits != 32
        dtype = torch.uint8 if in_8bit else torch.float32
        for number in range(1, self.moments + 1):
            state[f"state{number}"] = self._moment(parameter, dtype)
            if in_8bit:
                state[f"absmax{number}"] = torch.zeros(
                    math.ceil(count / STATE_BLOCK), dtype=torch.float32, device=parameter.device
                )
        state["step"] = 0

    def _moment(self, parameter: Any, dtype: torch.dtype) -> Any:
        if not self.paged or parameter.numel() < SMALLEST_PAGED:
            return torch.zeros_like(parameter, dtype=dtype)
        self.managed_bytes += parameter.numel() * dtype.itemsize
        return torch.empty(parameter.shape, dtype=dtype, device="meta")


_MOMENTS = {
    "AdamW": 2,
    "Adam": 2,
    "Lion": 1,
    "RMSprop": 1,
    "AdEMAMix": 3,
    "SGD": 1,
    "LAMB": 2,
    "Adagrad": 1,
}


def _classes() -> dict[str, Any]:
    """Return the names of `bitsandbytes.optim`: `AdamW`, `PagedAdamW8bit`, ..."""
    classes: dict[str, Any] = {"GlobalOptimManager": _Manager}
    widths = {"": 32, "8bit": 8, "32bit": 32}
    for kind, paged, width in itertools.product(_MOMENTS, ("", "Paged"), widths):
        name = f"{paged}{kind}{width}"
        attributes = {
            "__module__": "bitsandbytes.optim",
            "moments": _MOMENTS[kind],
            "bits_by_default": widths[width],
            "paged_by_default": bool(paged),
        }
        classes[name] = type(name, (_StateOnly,), attributes)
    return classes


_CLASSES = _classes()


# 2. Names of transformers.


_KINDS = {"adamw": "AdamW", "lion": "Lion", "rmsprop": "RMSprop", "ademamix": "AdEMAMix"}


def is_bitsandbytes(name: str) -> bool:
    """Return True if transformers takes the optimizer of this name (`optim`) from bitsandbytes."""
    kind, _, width = name.removeprefix("paged_").partition("_")
    if kind not in _KINDS:
        return False
    return name.startswith("paged_") or kind != "adamw" or width in ("8bit", "bnb_8bit")


def optimizer_for(name: str, params: Any, **settings: Any) -> Any:
    """Return the optimizer for transformers' name (`adamw_8bit`, ...); None for others."""
    if not is_bitsandbytes(name):
        return None
    kind = name.removeprefix("paged_").partition("_")[0]
    return _CLASSES[_KINDS[kind]](
        params,
        optim_bits=8 if "8bit" in name else 32,
        is_paged=name.startswith("paged_"),
        **settings,
    )


# 3. The package.


@all_entered
def installed() -> Iterator[AbstractContextManager[None]]:
    """Replace `bitsandbytes.optim`, with a stub of the package if that is not installed:
    transformers checks for it.
    """
    yield attribute(_Manager, "_only", None)
    module = ModuleType("bitsandbytes.optim")
    vars(module).update(_CLASSES)
    package = _installed_package()
    if package is None:
        package = ModuleType("bitsandbytes")
        package.__spec__ = ModuleSpec("bitsandbytes", None, is_package=True)
        package.__path__ = []
        yield swapped(sys.modules, "bitsandbytes", package)
        yield _availability_checks_pass()
    yield swapped(vars(package), "optim", module)
    yield swapped(sys.modules, "bitsandbytes.optim", module)


def _installed_package() -> ModuleType | None:
    package = sys.modules.get("bitsandbytes")
    if package is None and importlib.util.find_spec("bitsandbytes") is not None:
        package = importlib.import_module("bitsandbytes")
    return package


@all_entered
def _availability_checks_pass() -> Iterator[AbstractContextManager[None]]:
    for module_name in list(sys.modules):
        if not module_name.startswith("transformers.trainer"):
            continue
        names = vars(sys.modules[module_name])
        if callable(names.get("is_bitsandbytes_available")):
            yield swapped(names, "is_bitsandbytes_available", lambda *args, **kwargs: True)
