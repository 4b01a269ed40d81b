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


def config_of(model: dict[str, Any], folder: str | None, *, trust_remote_code: bool) -> Any:
    """Return the configuration, cut to `layers` decoder layers if requested."""
    import transformers

    config = dict(model.get("config") or {})
    if folder is not None or not config:
        made = transformers.AutoConfig.from_pretrained(
            str(folder or model["folder"]), trust_remote_code=trust_remote_code
        )
    elif (kind := config.pop("model_type", None)) in transformers.CONFIG_MAPPING:
        made = transformers.AutoConfig.for_model(kind, **config)
    else:
        raise Untraceable(
            f"Model type {kind!r}: unknown to transformers {transformers.__version__}. Pass the"
            " folder of a model with its code and allow remote code, or use a newer transformers."
        )
    if model.get("layers"):
        cut(made, int(model["layers"]))
    return made


def cut(config: Any, layers: int) -> None:
    """Reduce the decoder layers, with the kinds of the first ones."""
    text = config.get_text_config()
    every = text.num_hidden_layers
    by_layer = [
        name
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == every
    ]
    text.num_hidden_layers = layers
    for name in by_layer:
        setattr(text, name, list(getattr(text, name))[:layers])
    if getattr(text, "num_kv_shared_layers", None):  # the last layers
        text.num_kv_shared_layers = max(0, text.num_kv_shared_layers - (every - layers))


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

    options: dict[str, Any] = {}
    make, named = (
        transformers.AutoModelForCausalLM.from_config,
        (getattr(config, "architectures", None) or [""])[0],
    )
    if scores:
        config.num_labels, make = 1, transformers.AutoModelForSequenceClassification.from_config
    elif hasattr(config, "vision_config") and hasattr(
        transformers, named
    ):  # with its towers, as trainers load it
        make = getattr(transformers, named)._from_config
    else:
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
    made: dict[int, Any] = {}
    for module in model.modules():
        whole = quantised.as_read(module)
        holders = (module._parameters, module._buffers, vars(module))
        for holder in holders if whole is None else (holders[1], holders[0], holders[2]):
            for name, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                    if id(tensor) not in made:
                        empty = torch.empty_strided(
                            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                        )
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        new = (
                            torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                            if is_parameter
                            else empty
                        )
                        made[id(tensor)] = new
                    holder[name] = made[id(tensor)]
        del whole


@all_entered
def real_tensor_paths() -> Iterator[AbstractContextManager[None]]:
    """Let transformers take its paths for real tensors; for fake ones it makes a 4-D mask."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and callable(vars(module).get("is_tracing")):
            yield swapped(vars(module), "is_tracing", lambda *_, **__: False)


def adapters_on_meta() -> AbstractContextManager[None]:
    """Make adapters on meta: peft makes and fills them on the CPU."""
    from peft.tuners.tuners_utils import BaseTuner

    real = BaseTuner.inject_adapter

    def inject(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return real(self, model, *args, **kwargs)

    return attribute(BaseTuner, "inject_adapter", inject)


@all_entered
def fake_mode_with(tracker: Any, device: str) -> Iterator[AbstractContextManager[Any]]:
    """Open a fake mode with the tracker inside."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the tracker has a cache: see `dispatch_cache`
    yield mode
    yield tracker
    if (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):  # by `fsdp2.process_group`
        yield fsdp2.collectives_tracked(tracker)
    yield unseen_calls(tracker, device)


@all_entered
def unseen_calls(tracker: Any, device: str) -> Iterator[AbstractContextManager[None]]:
    """Replace functions that take or read memory without an operation."""
    resize, random_state, to_list, make = (
        torch.UntypedStorage.resize_,
        torch.get_rng_state,
        torch.Tensor.tolist,
        torch.tensor,
    )

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage, size)
        return result

    def get_rng_state() -> Any:  # checkpointing saves one per layer
        state = random_state()
        tracker.record(state)
        return state

    def tolist(tensor: Any) -> Any:
        known = integer_values.of(tensor)
        if known is None:
            raise Untraceable("a list of values that depend on data")
        return integer_values.outside(to_list, known)

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        of_tensors = isinstance(data, list) and data and isinstance(data[0], torch.Tensor)
        return make([one.item() for one in data] if of_tensors else data, *args, **kwargs)

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
        forwards = [
            frame
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name == "forward"
        ]
        modules = [
            owner
            for frame in forwards
            if isinstance(owner := frame.f_locals.get("self"), torch.nn.Module)
        ]
        if not modules:
            raise
        innermost = type(modules[-1]).__name__
        raise Untraceable(
            f"the step cannot be traced through {innermost}: {type(error).__name__}: {error}"
        ) from error


# Activations of TRL on the host.


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
        storage = tensor.untyped_storage()._cdata
        if any(kept.untyped_storage()._cdata == storage for kept in self._stash.values()):
            return tensor
        base = tensor if tensor._base is None else tensor._base
        if tensor.nbytes < MIN_OFFLOADED_BYTES or isinstance(base, torch.nn.Parameter):
            return tensor
        copied = tensor.contiguous() if 0 not in tensor.stride() else tensor
        for number in [number for number in self._stash if number <= self._saved - STASH]:
            del self._stash[number]
        self._stash[self._saved] = copied
        return _OnHost(self._saved, copied.shape, copied.stride(), copied.dtype, copied.device)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        kept = self._stash.pop(packed.number, None)
        if kept is not None:
            return kept
        return torch.empty_strided(
            packed.shape, packed.stride, dtype=packed.dtype, device=packed.device
        )


def offloaded_activations(model: Any, **_: Any) -> OffloadedActivations:
    """Return the hooks for a model, in place of TRL's function; its head is left out."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        kept = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: tensor
        )
        head.register_forward_pre_hook(lambda *_: kept.__enter__())
        head.register_forward_hook(lambda *_: kept.__exit__(), always_call=True)
    return OffloadedActivations()


# Vision towers.


def join_pieces(model: Any) -> None:
    """Let every attention that splits patches into pieces compute those of one length together."""
    for module in model.modules():
        if _takes_pieces(module) and not any(
            _takes_pieces(below) for below in module.modules() if below is not module
        ):
            module.forward = partial(_joined, module.forward)


def _takes_pieces(module: Any) -> bool:
    return (
        "cu_seqlens" in inspect.signature(module.forward).parameters
    )  # places where the pieces begin


def _joined(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _ByLength():
        return forward(*arguments, **named)


class _ByLength(TorchFunctionMode):  # type: ignore[misc]
    """Splits (1, heads, tokens, width) by lengths into one batch (pieces, heads, length, width) for
    each length, and joins attention's results (pieces, length, heads, width) again.

    Which tokens share a piece changes, which no allocation depends on: values are not traced.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(named or {})
        if (
            function is torch.split
            and len(arguments) == 2
            and isinstance(arguments[1], list)
            and given.get("dim") == 2
        ):
            pieces = Counter(arguments[1])
            parts = arguments[0].split([length * count for length, count in pieces.items()], dim=2)
            return tuple(
                part.unflatten(2, (count, length)).squeeze(0).transpose(0, 1)
                for part, (length, count) in zip(parts, pieces.items(), strict=True)
            )
        if function is torch.cat and given.get("dim") == 1:
            return torch.cat([one.reshape(1, -1, *one.shape[2:]) for one in arguments[0]], dim=1)
        return function(*arguments, **given)
