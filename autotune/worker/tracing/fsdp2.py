"""FSDP2 on one rank of a fake process group: torch's own `fully_shard`, as the installed accelerate
applies it.

Nothing is sent, so one process represents one rank. FSDP2 keeps tensors alive until the next
all-gather or reduce-scatter by plain references, on any device: a fake CPU rank holds the same as a
CUDA rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from . import Untraceable, sharding_kind
from .patching import all_entered, attribute

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wanted(spec: Mapping[str, Any]) -> bool:
    return sharding_kind(spec) == "fsdp2"


@contextmanager
def process_group(spec: Mapping[str, Any], *, rank: int = 0) -> Iterator[None]:
    """Open a fake process group for the duration of the trace; enter it before any fake mode."""
    if not wanted(spec):
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise Untraceable(
            "FSDP2: this process has a process group already. The trace needs its own."
        )
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=int(spec["sharding"]["ranks"])
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: Any, spec: Mapping[str, Any], tracker: Any, *, scores: bool = False) -> Any:
    """Return the model sharded by accelerate; whole tensors leave the ledger. `scores`: one that
    only scores, as a reference.
    """
    if not wanted(spec):
        return _cast_whole(model, spec)
    # Sharded parameters replace the whole ones, which are freed with their last reference.
    model = _prepare_scoring(model, spec) if scores else prepare(model, spec)
    gc.collect()
    if spec.get("device") == "cuda":
        _remove_freed(tracker.ledger)
        if not scores:
            _receive_weights(model, spec, tracker.ledger)
        tracker.ledger.current_stream = _streams_in_order()
    else:  # gloo's collectives have a buffer of the whole
        tracker.set_workspace(
            torch.ops.c10d._allgather_base_.default, lambda call: call.args[0].nbytes
        )
        tracker.set_workspace(
            torch.ops.c10d._reduce_scatter_base_.default, lambda call: call.args[1].nbytes
        )
    if any(not parameter.requires_grad for parameter in model.parameters()):
        tracker.set_part(
            [parameter for parameter in model.parameters() if parameter.requires_grad], "adapters"
        )
    return model


def _streams_in_order() -> Callable[[], int]:
    """Return a function that numbers the current stream in the order of first use; 0 is the
    default.

    FSDP2 enters its streams on every device. Those of the CPU do nothing, so that a fake CPU rank
    tells on which one a CUDA rank requests each block.
    """
    numbers = {id(torch.cpu.current_stream()): 0}
    kept: list[Any] = []  # an id is another object's once its own is freed

    def number() -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in numbers:
            numbers[id(stream)] = len(numbers)
            kept.append(stream)
        return numbers[id(stream)]

    return number


def prepare(model: Any, spec: Mapping[str, Any]) -> Any:
    """Apply accelerate's own preparation, on any process group, with fake and real tensors.

    The option `units: layers` instead shards as trainers that call `fully_shard` themselves."""
    if _options(spec).get("units") == "layers":
        return _shard_by_layer(model, spec, widened=True)
    try:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    except ImportError:
        return _shard_by_layer(model, spec)
    plugin = _plugin(model, spec)
    if plugin.activation_checkpointing:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac

        plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(_accelerator(plugin, spec), model)
    _upcast_trainable(model, spec)
    return fsdp2_prepare_model(_accelerator(plugin, spec), model)


def begin_rollout(model: Any) -> None:
    """Initialise FSDP2 as the first forward pass of a rollout does. It reads the dtypes of
    gradients from the parameters that train at that time: a reference pass with adapters off, if it
    came first, would leave adapters out.
    """
    if hasattr(model, "_get_fsdp_state"):
        model._get_fsdp_state()._lazy_init()


def _receive_weights(model: Any, spec: Mapping[str, Any], ledger: Any) -> None:
    """Load the weights as accelerate does on all ranks but the first (`cpu_ram_efficient_loading`):
    each parameter whole on the device, then this rank's shard of it. The segments of whole ones
    stay in torch's cache.
    """
    options, quantised = _options(spec), (spec.get("model") or {}).get("load_in_4bit")
    if (
        options.get("units") == "layers"
        or quantised
        or not _is_true(options.get("cpu_ram_efficient_loading", True))
    ):
        return
    try:
        from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    except ImportError:
        return
    if not all(hasattr(tensor, "device_mesh") for tensor in model.state_dict().values()):
        return  # accelerate shards no buffers
    before = len(ledger.sizes)
    fsdp2_load_full_state_dict(_accelerator(None, spec), model, {})
    model.tie_weights()
    gc.collect()
    _remove_freed(ledger, before)


def _prepare_scoring(model: Any, spec: Mapping[str, Any]) -> Any:
    """Shard a reference model as this TRL does: by its own function, where it is one unit that
    is gathered whole.
    """
    try:
        from trl.models.utils import prepare_fsdp
    except ImportError:
        return prepare(model, spec)
    return prepare_fsdp(model, _accelerator(_plugin(model, spec), spec))


def mixed_precision(spec: Mapping[str, Any]) -> str:
    """Return accelerate's name: `no`, `bf16` or `fp16`."""
    settings = spec.get("settings") or {}
    return "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "no"


def autocasts(spec: Mapping[str, Any]) -> bool:
    """Return True if accelerate autocasts the forward; FSDP2 and DeepSpeed cast themselves."""
    kind = sharding_kind(spec)
    return kind != "fsdp2" and not kind.startswith("zero")


def _cast_whole(model: Any, spec: Mapping[str, Any]) -> Any:
    """Cast the whole model, as DeepSpeed and FSDP1 do.

    DeepSpeed's engine casts all floating-point tensors, adapters included, before it makes its
    masters. FSDP1 under a mixed precision policy gathers every unit in that dtype.
    """
    kind, precision = sharding_kind(spec), mixed_precision(spec)
    if kind == "fsdp1":
        precision = str((spec["sharding"].get("options") or {}).get("mixed_precision", "no"))
    if not (kind.startswith("zero") or kind == "fsdp1") or precision == "no":
        return model
    _cast(model, _HALF[precision])
    return model


def _plugin(model: Any, spec: Mapping[str, Any]) -> Any:
    """Return the plugin that accelerate's launcher makes.

    The Trainer sets PEFT's own wrap policy for FSDP1 alone: under FSDP2 an adapter is part of its
    decoder layer's unit.
    """
    from accelerate import FullyShardedDataParallelPlugin

    options = _options(spec)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=str(
            options.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        ),  # transformers' default
        transformer_cls_names_to_wrap=options.get("transformer_layer_cls_to_wrap"),
        min_num_params=options.get("min_num_params"),
        reshard_after_forward=_is_true(options.get("reshard_after_forward", True)),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=_is_true(options.get("activation_checkpointing", False)),
    )
    if (precision := mixed_precision(spec)) != "no":
        plugin.set_mixed_precision(precision)
    return plugin


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's `fsdp_config` (prefix removed) with the options of the request."""
    given = (spec.get("settings") or {}).get("fsdp_config")
    options = (
        {name.removeprefix("fsdp_"): value for name, value in given.items()}
        if isinstance(given, Mapping)
        else {}
    )
    options.update((spec["sharding"].get("options") or {}).items())
    if _is_true(options.get("cpu_offload", options.get("offload_params", False))):
        raise Untraceable(
            "FSDP2 with parameters offloaded to the host cannot be traced: its shards would be"
            " counted on the device"
        )
    return options


def _is_true(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes")


def _accelerator(plugin: Any, spec: Mapping[str, Any]) -> Any:
    """Return the attributes of an Accelerator that the preparation reads."""
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed_precision(spec),
        is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh={("all",): _mesh(int(spec["sharding"]["ranks"]))},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["all"]),
    )


def _mesh(ranks: int) -> Any:
    """Return a mesh of real tensors: under a fake mode its ranks could not be read."""
    from torch.distributed.device_mesh import init_device_mesh

    with _disable_current_modes():
        return init_device_mesh("cpu", (ranks,))


def _upcast_trainable(model: Any, spec: Mapping[str, Any]) -> None:
    """Replace trainable parameters by float32 masters, as accelerate does under mixed precision."""
    if mixed_precision(spec) != "no" and any(
        isinstance(parameter.data, FakeTensor) for parameter in model.parameters()
    ):
        _cast(model, torch.float32, trainable=True)


def _cast(model: Any, dtype: torch.dtype, *, trainable: bool = False) -> None:
    """Replace parameters and buffers, or trainable parameters alone: fake parameters refuse
    `.data` of another type.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters,) if trainable else (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is None or not tensor.is_floating_point() or tensor.dtype is dtype:
                    continue
                if trainable and not tensor.requires_grad:
                    continue
                if id(tensor) not in made:
                    new = tensor.detach().to(dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = (
                        torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                        if is_parameter
                        else new
                    )
                held[name] = made[id(tensor)]


def _shard_by_layer(model: Any, spec: Mapping[str, Any], *, widened: bool = False) -> Any:
    """Shard per decoder layer, with the rest as root; adapters belong to their layer.

    `widened`: gradients are reduced in float32, outputs keep their type, and embeddings that are
    not tied are a unit, as in the trainers' own code. Otherwise for an accelerate without FSDP2.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = _HALF.get(mixed_precision(spec))
    reduced, out = (torch.float32, None) if widened else (dtype, dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=out)
    untied = widened and not getattr(model.config, "tie_word_embeddings", True)
    how = {"mesh": _mesh(int(spec["sharding"]["ranks"])), "mp_policy": policy}
    names = set(getattr(model, "_no_split_modules", None) or ())
    _upcast_trainable(model, spec)
    for module in list(model.modules()):
        if type(module).__name__ in names or (untied and isinstance(module, torch.nn.Embedding)):
            fully_shard(
                module,
                **how,
                reshard_after_forward=_is_true(_options(spec).get("reshard_after_forward", True)),
            )
    root = (
        {"reshard_after_forward": True}
        if _is_true(_options(spec).get("reshard_root", False))
        else {}
    )
    return fully_shard(model, **how, **root)


@all_entered
def collectives_tracked(tracker: Any) -> Iterator[AbstractContextManager[None]]:
    """Wrap torch's functions whose tensors are not recorded as they are made."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import _fsdp_param_group as group

    def inside(
        region: Callable[[], AbstractContextManager[None]], plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with region():
                return plain(*args, **kwargs)

        return run

    # DTensor's shape propagation is hidden: it runs operations on tensors of the unsharded size.
    for name in ("_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
        if (plain := getattr(ShardingPropagator, name, None)) is not None:
            yield attribute(ShardingPropagator, name, inside(tracker.untracked, plain))
    # Gathered and reduced buffers are communication, whole parameters included.
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
        if (plain := getattr(group, name, None)) is not None:
            yield attribute(group, name, inside(lambda: tracker.making("communication"), plain))


def _remove_freed(ledger: Any, end: int | None = None) -> None:
    """Remove freed allocations, of those before `end`: `fully_shard` moves and shards unit by
    unit.
    """
    live = {entry - 1 for entry in ledger.events if entry > 0} - {
        -entry - 1 for entry in ledger.events if entry < 0
    }
    kept = live if end is None else live | set(range(end, len(ledger.sizes)))
    ledger.events[:] = [entry for entry in ledger.events if abs(entry) - 1 in kept]
    ledger.live = ledger.peak = sum(ledger.sizes[number] for number in live)
    for mark in ledger.marks:
        mark["event"] = 0
    del ledger.marks[:-1]
