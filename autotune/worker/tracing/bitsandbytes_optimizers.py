"""bitsandbytes' optimizers without a GPU: size and place of their state; nothing is computed.

As in `bitsandbytes/optim/optimizer.py`: two moments (one for Lion and RMSprop, three for AdEMAMix)
in float32, or in 8 bits with a float32 scale per 256 numbers for parameters of at least 4,096
numbers; embeddings stay in 32 bits if transformers requests it. Large moments of a paged optimizer
are in managed memory, invisible to torch's allocator: they are on meta here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .patching import swapped

BLOCK = 256
SMALLEST_8BIT = 4096
SMALLEST_PAGED = 100_000


class _Manager:
    """`GlobalOptimManager`: parameters with another width of state."""

    _only: _Manager | None = None

    def __init__(self) -> None:
        self.overrides: list[tuple[Any, str, dict[str, Any]]] = []

    @classmethod
    def get_instance(cls) -> _Manager:
        cls._only = cls._only or cls()
        return cls._only

    def register_module_override(self, module: Any, name: str, config: dict[str, Any]) -> None:
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
        *args: Any,
        optim_bits: int | None = None,
        is_paged: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.bits = optim_bits or self.bits_by_default
        self.paged = self.paged_by_default if is_paged is None else is_paged
        self.managed_bytes = 0
        """Bytes of the state in managed memory."""
        super().__init__(params, {"lr": lr, "weight_decay": kwargs.get("weight_decay", 0.0)})

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
        count, state = parameter.numel(), self.state[parameter]
        small = count < SMALLEST_8BIT or _Manager.get_instance().bits_of(parameter, self.bits) == 32
        dtype = torch.float32 if small else torch.uint8
        for number in range(1, self.moments + 1):
            state[f"state{number}"] = self._moment(parameter, dtype)
            if dtype is torch.uint8:
                state[f"absmax{number}"] = torch.zeros(-(-count // BLOCK), dtype=torch.float32, device=parameter.device)
        state["step"] = 0

    def _moment(self, parameter: Any, dtype: torch.dtype) -> Any:
        if not self.paged or parameter.numel() < SMALLEST_PAGED:
            return torch.zeros_like(parameter, dtype=dtype)
        self.managed_bytes += parameter.numel() * dtype.itemsize
        return torch.empty(parameter.shape, dtype=dtype, device="meta")


_MOMENTS = {"AdamW": 2, "Adam": 2, "Lion": 1, "RMSprop": 1, "AdEMAMix": 3, "SGD": 1, "LAMB": 2, "Adagrad": 1}


def _classes() -> dict[str, Any]:
    made: dict[str, Any] = {"GlobalOptimManager": _Manager}
    for name, moments in _MOMENTS.items():
        for paged in (False, True):
            for suffix, bits in (("", 32), ("8bit", 8), ("32bit", 32)):
                full = f"{'Paged' if paged else ''}{name}{suffix}"
                names = {
                    "moments": moments,
                    "bits_by_default": bits,
                    "paged_by_default": paged,
                    "__module__": "bitsandbytes.optim",
                }
                made[full] = type(full, (_StateOnly,), names)
    return made


_CLASSES = _classes()


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
    kind = _KINDS[name.removeprefix("paged_").partition("_")[0]]
    return _CLASSES[kind](params, optim_bits=8 if "8bit" in name else 32, is_paged=name.startswith("paged_"), **settings)


@contextmanager
def installed() -> Iterator[None]:
    """Replace `bitsandbytes.optim`, whether or not the package is installed."""
    manager = _Manager._only
    _Manager._only = None
    module = ModuleType("bitsandbytes.optim")
    for name, value in _CLASSES.items():
        setattr(module, name, value)
    with contextlib.ExitStack() as stack:
        package = sys.modules.get("bitsandbytes") or _package(stack)
        if package is not None:
            stack.enter_context(swapped(vars(package), "optim", module))
        stack.enter_context(swapped(sys.modules, "bitsandbytes.optim", module))
        yield
    _Manager._only = manager


def _package(stack: contextlib.ExitStack) -> Any:
    """Return the bitsandbytes package, or a stub: transformers checks for the package."""
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        return bitsandbytes
    package = ModuleType("bitsandbytes")
    package.__spec__, package.__path__ = ModuleSpec("bitsandbytes", None, is_package=True), []
    stack.enter_context(swapped(sys.modules, "bitsandbytes", package))
    for name in [name for name in sys.modules if name.startswith("transformers.trainer")]:
        if callable(vars(sys.modules[name]).get("is_bitsandbytes_available")):
            stack.enter_context(swapped(vars(sys.modules[name]), "is_bitsandbytes_available", lambda *args, **kwargs: True))
    return package
