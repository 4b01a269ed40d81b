"""Models on meta with fake parameters, and patches for the framework's plain paths."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import Untraceable, integer_values, quantised
from .patching import all_entered, attribute, swapped


def config_of(model: dict[str, Any], folder: str | None, *, trust_remote_code: bool) -> Any:
    """Return the configuration, cut to `layers` decoder layers if requested."""
    import transformers

    config = dict(model.get("config") or {})
    if folder is not None or not config:
        made = transformers.AutoConfig.from_pretrained(str(folder or model["folder"]), trust_remote_code=trust_remote_code)
    elif (kind := config.pop("model_type", None)) in transformers.CONFIG_MAPPING:
        made = transformers.AutoConfig.for_model(kind, **config)
    else:
        raise Untraceable(
            f"Model type {kind!r}: unknown to transformers {transformers.__version__}. Pass the folder of a model with its "
            "code and allow remote code, or use a newer transformers."
        )
    if model.get("layers"):
        cut(made, int(model["layers"]))
    return made


def cut(config: Any, layers: int) -> None:
    """Reduce the decoder layers, with the kinds of the first ones."""
    text = config.get_text_config()
    every = text.num_hidden_layers
    by_layer = [name for name, value in vars(text).items() if isinstance(value, (list, tuple)) and len(value) == every]
    text.num_hidden_layers = layers
    for name in by_layer:
        setattr(text, name, list(getattr(text, name))[:layers])
    if getattr(text, "num_kv_shared_layers", None):  # the last layers
        text.num_kv_shared_layers = max(0, text.num_kv_shared_layers - (every - layers))


def build(
    config: Any, dtype: Any, attention: str | None, *, device: str = "meta", trust_remote_code: bool = False, scores: bool = False
) -> Any:
    """Build the architecture without weights, on meta or on a device; `scores`: with a reward model's head."""
    import transformers

    options: dict[str, Any] = {}
    make, named = transformers.AutoModelForCausalLM.from_config, (getattr(config, "architectures", None) or [""])[0]
    if scores:
        config.num_labels, make = 1, transformers.AutoModelForSequenceClassification.from_config
    elif hasattr(config, "vision_config") and hasattr(transformers, named):  # with its towers, as trainers load it
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
    """Replace every tensor on meta by an empty one on the CPU, in place; shared tensors remain shared.

    A weight that is packed while it is loaded is there whole before: its scales come first, then its packed form."""
    made: dict[int, Any] = {}
    for module in model.modules():
        whole = quantised.as_read(module)
        holders = (module._parameters, module._buffers, vars(module))
        for holder in holders if whole is None else (holders[1], holders[0], holders[2]):
            for name, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                    if id(tensor) not in made:
                        made[id(tensor)] = _on_cpu(tensor)
                    holder[name] = made[id(tensor)]
        del whole


def _on_cpu(tensor: Any) -> Any:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


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
    yield resizes_tracked(tracker)
    if device == "cpu":  # a GPU's states are on the host
        yield random_states_tracked(tracker)
    yield known_values_read()


@all_entered
def known_values_read() -> Iterator[AbstractContextManager[None]]:
    """Let `tolist` and a list of tensors of one element become known values: they read memory without an operation."""
    plain, make = torch.Tensor.tolist, torch.tensor

    def tolist(tensor: Any) -> Any:
        known = integer_values.of(tensor)
        if known is None:
            raise Untraceable("a list of values that depend on data")
        return integer_values.outside(plain, known)

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        of_tensors = isinstance(data, list) and data and isinstance(data[0], torch.Tensor)
        return make([one.item() for one in data] if of_tensors else data, *args, **kwargs)

    yield attribute(torch.Tensor, "tolist", tolist)
    yield attribute(torch, "tensor", tensor)


def resizes_tracked(tracker: Any) -> AbstractContextManager[None]:
    """Report `UntypedStorage.resize_` to the tracker: it is no operation."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        tracker.resized(storage, size)
        return result

    return attribute(torch.UntypedStorage, "resize_", resize_)


def random_states_tracked(tracker: Any) -> AbstractContextManager[None]:
    """Report random states to the tracker: checkpointing saves one per layer."""
    plain = torch.get_rng_state

    def get_rng_state() -> Any:
        state = plain()
        tracker.book(state)
        return state

    return attribute(torch, "get_rng_state", get_rng_state)


@contextmanager
def errors_as_untraceable() -> Iterator[None]:
    """Raise errors of fake tensors as Untraceable, with the module that failed."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        forwards = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
        modules = [owner for frame in forwards if isinstance(owner := frame.f_locals.get("self"), torch.nn.Module)]
        if not modules:
            raise
        innermost = type(modules[-1]).__name__
        raise Untraceable(f"the step cannot be traced through {innermost}: {type(error).__name__}: {error}") from error
