"""Models on meta with fake parameters, and patches that lead libraries through a step without
memory.

TRL's `activation_offloading` is traced without streams and copies: which saved tensors stay on the
GPU, and until when. Source: `trl/models/activation_offloading.py` (OffloadActivations,
get_act_offloading_ctx_manager). A tensor saved for the backward pass goes to the host, and stays on
the GPU until a few more were saved. What is saved again meanwhile is kept. Small tensors,
parameters and the input of the head never go.

Without a flash-attention package, Qwen's vision towers split their patches by images and windows
and call attention once for each piece: several hundred calls per layer and pass for a batch of
photographs. A trace needs as long for each call as for one over all of them. Pieces of one length
become the rows of a batch here: the same tensors, kept equally long, with the same arithmetic.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from . import Untraceable, fsdp2, integer_values, quantised
from .patching import all_entered, attribute, swapped

# 1. Models on meta.


def config_of(
    model: dict[str, Any],
    folder: str | None,
    *,
    trust_remote_code: bool,
) -> Any:
    """Return the configuration, cut to `layers` decoder layers if requested."""
    import transformers

    fields = dict(model.get("config") or {})
    model_type = fields.get("model_type")
    if folder is not None or not fields:
        config = transformers.AutoConfig.from_pretrained(
            str(folder or model["folder"]), trust_remote_code=trust_remote_code
        )
    elif model_type in transformers.CONFIG_MAPPING:
        del fields["model_type"]
        config = transformers.AutoConfig.for_model(model_type, **fields)
    else:
        raise Untraceable(
            f"Model type {model_type!r}: unknown to transformers {transformers.__version__}. Pass"
            " the folder of a model with its code and allow remote code, or use a newer"
            " transformers."
        )
    if model.get("layers"):
        cut(config, int(model["layers"]))
    return config


def cut(config: Any, layers: int) -> None:
    """Reduce the decoder layers, with the kinds of the first ones."""
    text = config.get_text_config()
    all_layers = text.num_hidden_layers
    by_layer = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == all_layers
    }
    text.num_hidden_layers = layers
    for name, value in by_layer.items():
        setattr(text, name, list(value)[:layers])
    sharing = getattr(text, "num_kv_shared_layers", None)
    if sharing:  # the last layers
        unshared = sharing - (all_layers - layers)
        text.num_kv_shared_layers = max(0, unshared)


def build(
    config: Any,
    dtype: Any,
    attention: str | None,
    *,
    device: str = "meta",
    trust_remote_code: bool = False,
    scores: bool = False,
) -> Any:
    """Build the architecture without weights, on meta or on a device; `scores`: with a reward
    model's head.
    """
    import transformers

    architectures = getattr(config, "architectures", None) or [""]
    architecture = architectures[0]
    has_vision = hasattr(config, "vision_config") and hasattr(transformers, architecture)
    options: dict[str, Any] = {}
    if scores:
        config.num_labels = 1
        make = transformers.AutoModelForSequenceClassification.from_config
    elif has_vision:  # with its towers, as trainers load it
        make = getattr(transformers, architecture)._from_config
    else:
        make = transformers.AutoModelForCausalLM.from_config
        options["trust_remote_code"] = trust_remote_code
    if attention is not None:
        options["attn_implementation"] = attention
    with torch.device(device):
        try:
            model = make(config, dtype=dtype, **options)
        except TypeError:  # older releases
            model = make(config, torch_dtype=dtype, **options)
    return model.train()


def materialise(model: Any) -> None:
    """Replace every tensor on meta by an empty one on the CPU, in place; shared tensors remain
    shared.

    A weight that is packed while it is loaded is there whole before: its scales come first, then
    its packed form.
    """
    empty_tensors: dict[int, Any] = {}
    for module in model.modules():
        tables = [module._parameters, module._buffers, vars(module)]
        unpacked = quantised.as_read(module)
        if unpacked is not None:
            tables = [module._buffers, module._parameters, vars(module)]
        for table in tables:
            for name, tensor in list(table.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
                    continue
                if id(tensor) not in empty_tensors:
                    empty_tensors[id(tensor)] = _empty_on_cpu(tensor)
                table[name] = empty_tensors[id(tensor)]
        del unpacked


def _empty_on_cpu(tensor: Any) -> Any:
    empty = torch.empty_strided(
        tensor.size(),
        tensor.stride(),
        dtype=tensor.dtype,
        device="cpu",
    )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def adapters_on_meta() -> AbstractContextManager[None]:
    """Make adapters on meta: peft makes and fills them on the CPU."""
    from peft.tuners.tuners_utils import BaseTuner

    inject_of_peft = BaseTuner.inject_adapter

    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return inject_of_peft(self, model, *args, **kwargs)

    return attribute(BaseTuner, "inject_adapter", inject_adapter)


# 2. The fake mode, and what runs in it.


@all_entered
def real_tensor_paths() -> Iterator[AbstractContextManager[None]]:
    """Let transformers take its paths for real tensors; for fake ones it makes a 4-D mask."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and callable(vars(module).get("is_tracing")):
            yield swapped(vars(module), "is_tracing", lambda *_, **__: False)


@all_entered
def fake_mode_with(tracker: Any, device: str) -> Iterator[AbstractContextManager[Any]]:
    """Open a fake mode with the tracker inside."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the tracker has a cache: see `dispatch_cache`
    yield mode
    yield tracker
    # A group is there if `fsdp2.process_group` opened one.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield fsdp2.collectives_tracked(tracker)
    yield unseen_calls(tracker, device)


@all_entered
def unseen_calls(tracker: Any, device: str) -> Iterator[AbstractContextManager[None]]:
    """Replace functions that take or read memory without an operation."""
    resize_of_torch = torch.UntypedStorage.resize_
    state_of_torch = torch.get_rng_state
    to_list_of_torch = torch.Tensor.tolist
    tensor_of_torch = torch.tensor

    def resize_(storage: Any, size: int) -> Any:
        result = resize_of_torch(storage, size)
        tracker.resized(storage, size)
        return result

    def get_rng_state() -> Any:  # checkpointing saves one per layer
        state = state_of_torch()
        tracker.record(state)
        return state

    def tolist(tensor: Any) -> Any:
        real = integer_values.of(tensor)
        if real is None:
            raise Untraceable("a list of values that depend on data")
        return integer_values.outside(to_list_of_torch, real)

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, list) and data and isinstance(data[0], torch.Tensor):
            data = [number.item() for number in data]
        return tensor_of_torch(data, *args, **kwargs)

    yield attribute(torch.UntypedStorage, "resize_", resize_)
    if device == "cpu":  # a GPU's states are on the host
        yield attribute(torch, "get_rng_state", get_rng_state)
    yield attribute(torch.Tensor, "tolist", tolist)
    yield attribute(torch, "tensor", tensor)


@contextmanager
def errors_as_untraceable() -> Iterator[None]:
    """Raise errors of fake tensors as Untraceable, with the module that failed."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        module = _innermost_module(error)
        if module is None:
            raise
        raise Untraceable(
            f"the step cannot be traced through {type(module).__name__}:"
            f" {type(error).__name__}: {error}"
        ) from error


def _innermost_module(error: Exception) -> Any:
    """Return the module whose forward pass raised the error; None outside of modules."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                innermost = owner
    return innermost


# 3. Activations of TRL on the host.


MIN_OFFLOADED_BYTES = 1024
STASH = 5
"""Tensors saved after one until it leaves the GPU."""


class _OnHost(NamedTuple):
    number: int
    shape: Any
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]
    """Hooks around a training step. Values are not kept: a trace needs sizes alone."""

    def __init__(self) -> None:
        self._saved = 0
        self._stash: dict[int, torch.Tensor] = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._saved += 1
        if self._is_stashed(tensor) or not _is_offloaded(tensor):
            return tensor
        activation = tensor
        if 0 not in tensor.stride():
            activation = tensor.contiguous()
        self._stash = {
            number: stashed
            for number, stashed in self._stash.items()
            if number > self._saved - STASH
        }
        self._stash[self._saved] = activation
        return _OnHost(
            number=self._saved,
            shape=activation.shape,
            stride=activation.stride(),
            dtype=activation.dtype,
            device=activation.device,
        )

    def _is_stashed(self, tensor: torch.Tensor) -> bool:
        memory = tensor.untyped_storage()._cdata
        return any(stashed.untyped_storage()._cdata == memory for stashed in self._stash.values())

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        stashed = self._stash.pop(packed.number, None)
        if stashed is not None:
            return stashed
        return torch.empty_strided(
            packed.shape, packed.stride, dtype=packed.dtype, device=packed.device
        )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return tensor.nbytes >= MIN_OFFLOADED_BYTES and not isinstance(base, torch.nn.Parameter)


def offloaded_activations(model: Any, **_: Any) -> OffloadedActivations:
    """Return the hooks for a model, in place of TRL's function; its head is left out."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        saved_as_is = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: tensor
        )
        head.register_forward_pre_hook(lambda *_: saved_as_is.__enter__())
        head.register_forward_hook(lambda *_: saved_as_is.__exit__(), always_call=True)
    return OffloadedActivations()


# 4. Vision towers.


def join_pieces(model: Any) -> None:
    """Let every attention that splits patches into pieces compute those of one length together."""
    for module in model.modules():
        if _takes_pieces(module) and not any(map(_takes_pieces, _modules_inside(module))):
            module.forward = partial(_joined, module.forward)


def _modules_inside(module: Any) -> list[Any]:
    return list(module.modules())[1:]


def _takes_pieces(module: Any) -> bool:
    # The argument has the places where the pieces begin.
    return "cu_seqlens" in inspect.signature(module.forward).parameters


def _joined(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _ByLength():
        return forward(*args, **kwargs)


class _ByLength(TorchFunctionMode):  # type: ignore[misc]
    """Splits (1, heads, tokens, width) by lengths into one batch (pieces, heads, length, width) for
    each length, and joins attention's results (pieces, length, heads, width) again.

    Which tokens share a piece changes, which no allocation depends on: values are not traced.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.split and len(args) == 2:
            tokens, lengths = args
            if isinstance(lengths, list) and kwargs.get("dim") == 2:
                return _split_by_length(tokens, lengths)
        if function is torch.cat and kwargs.get("dim") == 1:
            rows = []
            for pieces in args[0]:
                row = pieces.reshape(1, -1, *pieces.shape[2:])
                rows.append(row)
            return torch.cat(rows, dim=1)
        return function(*args, **kwargs)


def _split_by_length(tokens: Any, lengths: Sequence[int]) -> tuple[Any, ...]:
    counts = Counter(lengths)
    sizes = [length * count for length, count in counts.items()]
    parts = tokens.split(sizes, dim=2)
    batches = []
    for part, (length, count) in zip(parts, counts.items(), strict=True):
        pieces = part.unflatten(2, (count, length))
        batches.append(pieces.squeeze(0).transpose(0, 1))
    return tuple(batches)
