"""Models on meta with fake parameters, and patches for the framework's plain paths."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import Untraceable, integer_values, quantised
from .patching import attribute, swapped


def config_of(model: dict[str, Any], folder: str | None, *, trust_remote_code: bool) -> Any:
    """Return the configuration, cut to `layers` decoder layers if requested."""
    from transformers import AutoConfig

    config = dict(model.get("config") or {}) if folder is None else {}
    if folder is not None or not config:
        made = AutoConfig.from_pretrained(str(folder or model["folder"]), trust_remote_code=trust_remote_code)
    else:
        made = _known_config(config)
    if model.get("layers"):
        cut(made, int(model["layers"]))
    return made


def _known_config(config: dict[str, Any]) -> Any:
    import transformers

    kind = config.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise Untraceable(
            f"Model type {kind!r}: unknown to transformers {transformers.__version__}. Pass the folder of a model with its "
            "code and allow remote code, or use a newer transformers."
        )
    return transformers.AutoConfig.for_model(kind, **config)


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


@contextmanager
def real_tensor_paths() -> Iterator[None]:
    """Let transformers take its paths for real tensors; for fake ones it makes a 4-D mask."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and callable(vars(module).get("is_tracing")):
                stack.enter_context(swapped(vars(module), "is_tracing", lambda *_, **__: False))
        yield


@contextmanager
def adapters_on_meta() -> Iterator[None]:
    """Make adapters on meta: peft makes and fills them on the CPU."""
    from peft.tuners.tuners_utils import BaseTuner

    real = BaseTuner.inject_adapter

    def inject(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return real(self, model, *args, **kwargs)

    with attribute(BaseTuner, "inject_adapter", inject):
        yield


@contextmanager
def fake_mode_with(tracker: Any, device: str) -> Iterator[None]:
    """Open a fake mode with the tracker inside."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    states = random_states_tracked(tracker) if device == "cpu" else contextlib.nullcontext()  # a GPU's states are on the host
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the tracker has a cache: see `dispatch_cache`
    with mode, tracker, resizes_tracked(tracker), states, known_values_read():
        yield


@contextmanager
def known_values_read() -> Iterator[None]:
    """Let `tolist` and a list of tensors of one element become known values: they read memory without an operation."""
    plain, make = torch.Tensor.tolist, torch.tensor

    def tolist(tensor: Any) -> Any:
        known = integer_values.of(tensor)
        if known is None:
            raise Untraceable("a list of values that depend on data")
        return integer_values.unfaked(lambda: plain(known))

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        of_tensors = isinstance(data, list) and data and isinstance(data[0], torch.Tensor)
        return make([one.item() for one in data] if of_tensors else data, *args, **kwargs)

    with attribute(torch.Tensor, "tolist", tolist), attribute(torch, "tensor", tensor):
        yield


@contextmanager
def resizes_tracked(tracker: Any) -> Iterator[None]:
    """Report `UntypedStorage.resize_` to the tracker: it is no operation."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        tracker.resized(storage, size)
        return result

    with attribute(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def random_states_tracked(tracker: Any) -> Iterator[None]:
    """Report random states to the tracker: checkpointing saves one per layer."""
    plain = torch.get_rng_state

    def get_rng_state() -> Any:
        state = plain()
        tracker.book(state)
        return state

    with attribute(torch, "get_rng_state", get_rng_state):
        yield


@contextmanager
def errors_as_untraceable() -> Iterator[None]:
    """Raise errors of fake tensors as Untraceable, with the module that failed."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        module = _module_of(error)
        if module is None:
            raise
        raise Untraceable(f"the step cannot be traced through {module}: {type(error).__name__}: {error}") from error


def _module_of(error: BaseException) -> str | None:
    """Return the innermost module in whose `forward` the error was raised."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, torch.nn.Module):
            found = type(owner).__name__
    return found
