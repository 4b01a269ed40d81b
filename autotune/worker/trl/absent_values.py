"""Values of tensors that have none: a model without weights may generate and be evaluated.

Scripts often look at a model before they train it: they generate an answer, or compute a loss. What
comes out decides nothing of the training, and is zero here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..tracing.patching import attribute

NEEDING_VALUES = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    }
)
"""Methods of a tensor that a tensor on the device `meta` lacks."""

MOVING = frozenset({"to", "cuda"})


class _ZeroValues(TorchFunctionMode):  # type: ignore[misc]
    """Answers zero where a value is needed; a device that is not here is the device `meta`."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        subject = next(iter(args), None)
        if name in NEEDING_VALUES and _is_empty(subject):
            args = (_zeros(subject), *args[1:])
        elif name in MOVING and isinstance(subject, torch.Tensor):
            return _moved(subject, name, args[1:], options)
        elif _is_absent_device(options.get("device")):
            options["device"] = "meta"
        return function(*args, **options)


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the tensor's shape in the memory of one."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _is_absent_device(value: Any) -> bool:
    """Return True for a GPU on a machine without one."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"cuda:{value}"
    is_gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return is_gpu and not torch.cuda.is_available()


def _moved(
    tensor: torch.Tensor,
    name: str,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return the tensor after `to` or `cuda`, without a device that is not here."""
    if name == "cuda":
        return tensor
    targets = [value for value in args if not _is_absent_device(value)]
    move_options = dict(options)
    if _is_absent_device(move_options.get("device")):
        move_options.pop("device")
    devices = (*targets, move_options.get("device"))
    if tensor.is_meta and "cpu" in map(str, devices):
        tensor = _zeros(tensor)
    if not targets and not move_options:
        return tensor
    return tensor.to(*targets, **move_options)


@contextmanager
def zeros() -> Iterator[None]:
    """Give tensors without values zeros, and let models without weights generate."""
    from transformers import GenerationMixin

    no_text = attribute(GenerationMixin, "generate", _generated)
    with no_text, _ZeroValues():
        yield


def _generated(_: Any, inputs: Any = None, **options: Any) -> Any:
    """Return the prompts with one token behind each."""
    prompts = options.get("input_ids", inputs)
    if prompts is None:
        prompts = torch.zeros((1, 1), dtype=torch.long)
    rows, length = prompts.shape
    return torch.zeros((rows, length + 1), dtype=torch.long)
