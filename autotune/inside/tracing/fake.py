"""Models without memory: built on meta, then given fake parameters; and the framework's code kept on the paths of a plain run."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import Untraceable
from .swap import attribute

Make = Callable[[Any], Any]
"""From a tensor on meta to one on the device."""


def config_of(model: dict[str, Any], folder: str | None, *, trust_remote_code: bool) -> Any:
    """The configuration, cut to `layers` decoder layers where so many are asked for."""
    from transformers import AutoConfig

    config = dict(model.get("config") or {}) if folder is None else {}
    if folder is not None or not config:
        made = AutoConfig.from_pretrained(str(folder or model["folder"]), trust_remote_code=trust_remote_code)
    else:
        made = _of_a_known_kind(config)
    if model.get("layers"):
        cut(made, int(model["layers"]))
    return made


def _of_a_known_kind(config: dict[str, Any]) -> Any:
    import transformers

    kind = config.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise Untraceable(
            f"transformers {transformers.__version__} knows no model of the type {kind!r}: its code would have to come with the "
            "model; give its folder and allow remote code, or use a newer transformers."
        )
    return transformers.AutoConfig.for_model(kind, **config)


def cut(config: Any, layers: int) -> None:
    """Fewer decoder layers of the same kinds."""
    text = config.get_text_config()
    text.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        kinds = getattr(text, name, None)
        if kinds:
            setattr(text, name, list(kinds)[:layers])


def build(config: Any, dtype: Any, attention: str | None, *, device: str = "meta", trust_remote_code: bool = False) -> Any:
    """The architecture with no weights read: on meta, or for real."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = attention
    with torch.device(device):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
        except TypeError:  # releases that call it torch_dtype
            model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, **options)
    return model.train()


def swap_in(model: Any, make: Make) -> None:
    """Every tensor on meta by one that `make` gives, in place; what was one tensor under several names stays one."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, tensor in list(holder.items()):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                    if id(tensor) not in made:
                        made[id(tensor)] = _as_parameter(tensor, make)
                    holder[name] = made[id(tensor)]


def _as_parameter(tensor: Any, make: Make) -> Any:
    swap = getattr(tensor, "made_on_the_device", None)  # a kind of its own, which says itself what it is made of
    if swap is not None:
        return swap(make)
    real = make(tensor)
    return torch.nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else real


def empty_on(device: str) -> Make:
    """Inside a fake mode, a fake tensor of the same shape and strides."""

    def make(tensor: Any) -> Any:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    return make


@contextmanager
def as_if_real() -> Iterator[None]:
    """transformers asks whether a tensor is fake, and then takes another path than with a real one: always a 4-D mask."""
    patched: list[tuple[Any, Any]] = []
    for name, module in list(sys.modules.items()):
        found = vars(module).get("is_tracing") if name.startswith("transformers.") else None
        if callable(found):
            patched.append((module, found))
            module.is_tracing = lambda *_, **__: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, found in patched:
            module.is_tracing = found


@contextmanager
def adapters_on_meta() -> Iterator[None]:
    """peft makes an adapter's matrices on the CPU and fills them; where the model is on meta, they are made there."""
    from peft.tuners.tuners_utils import BaseTuner

    real = BaseTuner.inject_adapter

    def inject(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return real(self, model, *args, **kwargs)

    BaseTuner.inject_adapter = inject
    try:
        yield
    finally:
        BaseTuner.inject_adapter = real


@contextmanager
def without_memory(tracker: Any, device: str) -> Iterator[None]:
    """Inside, every tensor is fake and the tracker sees what is done with it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    states = random_states_seen(tracker) if device == "cpu" else contextlib.nullcontext()  # a GPU's are kept on the host
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # the tracker remembers; noting everything twice takes longer than it saves
    with mode, tracker, resizes_seen(tracker), states:
        yield


@contextmanager
def resizes_seen(tracker: Any) -> Iterator[None]:
    """`UntypedStorage.resize_` is no operation, so it has to be told."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        tracker.resized(storage, size)
        return result

    with attribute(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def random_states_seen(tracker: Any) -> Iterator[None]:
    """Checkpointing keeps the generator's state with each layer, and no operation makes that tensor."""
    plain = torch.get_rng_state

    def get_rng_state() -> Any:
        state = plain()
        tracker.book(state)
        return state

    with attribute(torch, "get_rng_state", get_rng_state):
        yield


@contextmanager
def explained() -> Iterator[None]:
    """An error that only fake tensors raise comes out as Untraceable, with the module whose code could not be followed."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        module = _module_of(error)
        if module is None:
            raise
        raise Untraceable(f"the step cannot be followed through {module}: {type(error).__name__}: {error}") from error


def _module_of(error: BaseException) -> str | None:
    """The innermost module in whose `forward` the error was raised."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, torch.nn.Module):
            found = type(owner).__name__
    return found
