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

from . import Spec, Untraceable, sharding_kind
from .patching import all_entered, attribute

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

# 1. The specification.


def wanted(spec: Spec) -> bool:
    return sharding_kind(spec) == "fsdp2"


def mixed_precision(spec: Spec) -> str:
    """Return accelerate's name: `no`, `bf16` or `fp16`."""
    settings = spec.get("settings") or {}
    for name in ("bf16", "fp16"):
        if settings.get(name):
            return name
    return "no"


def autocasts(spec: Spec) -> bool:
    """Return True if accelerate autocasts the forward; FSDP2 and DeepSpeed cast themselves."""
    kind = sharding_kind(spec)
    return kind != "fsdp2" and not kind.startswith("zero")


def _ranks(spec: Spec) -> int:
    return int(spec["sharding"]["ranks"])


def _options(spec: Spec) -> dict[str, Any]:
    """Return the user's `fsdp_config` (prefix removed) with the options of the request."""
    options: dict[str, Any] = {}
    settings = spec.get("settings") or {}
    fsdp_config = settings.get("fsdp_config")
    if isinstance(fsdp_config, Mapping):
        for name, value in fsdp_config.items():
            options[name.removeprefix("fsdp_")] = value
    stated = spec["sharding"].get("options") or {}
    options.update(stated)
    offloads = options.get("cpu_offload", options.get("offload_params", False))
    if _is_true(offloads):
        raise Untraceable(
            "FSDP2 with parameters offloaded to the host cannot be traced: its shards would be"
            " counted on the device"
        )
    return options


def _is_true(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return str(value).lower() in ("true", "1", "yes")


# 2. The process group and the model.


@contextmanager
def process_group(spec: Spec, *, rank: int = 0) -> Iterator[None]:
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
        "fake",
        store=FakeStore(),
        rank=rank,
        world_size=_ranks(spec),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(
    model: Any,
    spec: Spec,
    tracker: Any,
    *,
    scores: bool = False,
) -> Any:
    """Return the model sharded by accelerate; whole tensors leave the ledger. `scores`: one that
    only scores, as a reference.
    """
    if not wanted(spec):
        return _cast_as_engines_do(model, spec)

    # 1. Sharded parameters replace the whole ones, which are freed with their last reference.
    model = _prepare_scoring(model, spec) if scores else prepare(model, spec)
    gc.collect()

    # 2. What differs by device.
    if spec.get("device") == "cuda":
        _remove_freed(tracker.ledger)
        if not scores:
            _receive_weights(model, spec, tracker.ledger)
        tracker.ledger.current_stream = _streams_in_order()
    else:  # gloo's collectives have a buffer of the whole
        collectives = torch.ops.c10d
        tracker.set_workspace(
            collectives._allgather_base_.default, lambda call: call.args[0].nbytes
        )
        tracker.set_workspace(
            collectives._reduce_scatter_base_.default, lambda call: call.args[1].nbytes
        )

    # 3. Parts of the shards.
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if len(trainable) < len(parameters):
        tracker.set_part(trainable, "adapters")
    return model


def _streams_in_order() -> Callable[[], int]:
    """Return a function that numbers the current stream in the order of first use; 0 is the
    default.

    FSDP2 enters its streams on every device. Those of the CPU do nothing, so that a fake CPU rank
    shows on which one a CUDA rank requests each block.
    """
    numbers = {id(torch.cpu.current_stream()): 0}
    streams: list[Any] = []  # an id is another object's once its own is freed

    def number() -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in numbers:
            numbers[id(stream)] = len(numbers)
            streams.append(stream)
        return numbers[id(stream)]

    return number


def begin_rollout(model: Any) -> None:
    """Initialise FSDP2 as the first forward pass of a rollout does. It reads the dtypes of
    gradients from the parameters that train at that time: a reference pass with adapters off, if it
    came first, would leave adapters out.
    """
    if hasattr(model, "_get_fsdp_state"):
        model._get_fsdp_state()._lazy_init()


# 3. Preparation by accelerate.


def prepare(model: Any, spec: Spec) -> Any:
    """Apply accelerate's own preparation, on any process group, with fake and real tensors.

    The option `units: layers` instead shards as trainers that call `fully_shard` themselves."""
    if _options(spec).get("units") == "layers":
        return _shard_by_layer(model, spec, widened=True)
    try:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    except ImportError:
        return _shard_by_layer(model, spec)
    plugin = _plugin(spec)
    if plugin.activation_checkpointing:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac

        plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(_accelerator(plugin, spec), model)
    _upcast_trainable(model, spec)
    return fsdp2_prepare_model(_accelerator(plugin, spec), model)


def _prepare_scoring(model: Any, spec: Spec) -> Any:
    """Shard a reference model as this TRL does: by its own function, where it is one unit that
    is gathered whole.
    """
    try:
        from trl.models.utils import prepare_fsdp
    except ImportError:
        return prepare(model, spec)
    return prepare_fsdp(model, _accelerator(_plugin(spec), spec))


def _plugin(spec: Spec) -> Any:
    """Return the plugin that accelerate's launcher makes.

    The Trainer sets PEFT's own wrap policy for FSDP1 alone: under FSDP2 an adapter is part of its
    decoder layer's unit. The default policy is that of transformers.
    """
    from accelerate import FullyShardedDataParallelPlugin

    options = _options(spec)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=str(options.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")),
        transformer_cls_names_to_wrap=options.get("transformer_layer_cls_to_wrap"),
        min_num_params=options.get("min_num_params"),
        reshard_after_forward=_is_true(options.get("reshard_after_forward", True)),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=_is_true(options.get("activation_checkpointing", False)),
    )
    precision = mixed_precision(spec)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    return plugin


def _accelerator(plugin: Any, spec: Spec) -> Any:
    """Return the attributes of an Accelerator that the preparation reads."""
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed_precision(spec),
        is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh={("all",): _mesh(spec)},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["all"]),
    )


def _mesh(spec: Spec) -> Any:
    """Return a mesh of real tensors: under a fake mode its ranks could not be read."""
    from torch.distributed.device_mesh import init_device_mesh

    with _disable_current_modes():
        return init_device_mesh("cpu", (_ranks(spec),))


def _receive_weights(
    model: Any,
    spec: Spec,
    ledger: Any,
) -> None:
    """Load the weights as accelerate does on all ranks but the first (`cpu_ram_efficient_loading`):
    each parameter whole on the device, then this rank's shard of it. The segments of whole ones
    stay in torch's cache.
    """
    options = _options(spec)
    model_spec = spec.get("model") or {}
    quantised = model_spec.get("load_in_4bit")
    loads_efficiently = _is_true(options.get("cpu_ram_efficient_loading", True))
    if options.get("units") == "layers" or quantised or not loads_efficiently:
        return
    try:
        from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    except ImportError:
        return
    if not all(hasattr(tensor, "device_mesh") for tensor in model.state_dict().values()):
        return  # accelerate shards no buffers
    end_of_sharding = len(ledger.sizes)
    fsdp2_load_full_state_dict(_accelerator(None, spec), model, {})
    model.tie_weights()
    gc.collect()
    _remove_freed(ledger, end_of_sharding)


def _shard_by_layer(
    model: Any,
    spec: Spec,
    *,
    widened: bool = False,
) -> Any:
    """Shard per decoder layer, with the rest as root; adapters belong to their layer.

    `widened`: gradients are reduced in float32, outputs keep their type, and embeddings that are
    not tied are a unit, as in the trainers' own code. Otherwise for an accelerate without FSDP2.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # 1. Options of every unit.
    options = _options(spec)
    dtype = _HALF.get(mixed_precision(spec))
    if widened:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32,
            output_dtype=None,
        )
    else:
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=dtype,
            output_dtype=dtype,
        )
    unit_options = {"mesh": _mesh(spec), "mp_policy": policy}
    _upcast_trainable(model, spec)

    # 2. Layers and embeddings.
    untied = widened and not getattr(model.config, "tie_word_embeddings", True)
    class_names = getattr(model, "_no_split_modules", None) or ()
    layer_names = set(class_names)
    reshards = _is_true(options.get("reshard_after_forward", True))
    for module in list(model.modules()):
        is_embedding = untied and isinstance(module, torch.nn.Embedding)
        if type(module).__name__ in layer_names or is_embedding:
            fully_shard(module, **unit_options, reshard_after_forward=reshards)

    # 3. The root.
    if _is_true(options.get("reshard_root", False)):
        unit_options["reshard_after_forward"] = True
    return fully_shard(model, **unit_options)


# 4. Types of parameters.


def _cast_as_engines_do(model: Any, spec: Spec) -> Any:
    """Cast the whole model, as DeepSpeed and FSDP1 do.

    DeepSpeed's engine casts all floating-point tensors, adapters included, before it makes its
    masters. FSDP1 under a mixed precision policy gathers every unit in that dtype.
    """
    kind = sharding_kind(spec)
    precision = "no"
    if kind.startswith("zero"):
        precision = mixed_precision(spec)
    elif kind == "fsdp1":
        options = spec["sharding"].get("options") or {}
        precision = str(options.get("mixed_precision", "no"))
    if precision != "no":
        _cast(model, _HALF[precision])
    return model


def _upcast_trainable(model: Any, spec: Spec) -> None:
    """Replace trainable parameters by float32 masters, as accelerate does under mixed precision."""
    if mixed_precision(spec) == "no":
        return
    if any(isinstance(parameter.data, FakeTensor) for parameter in model.parameters()):
        _cast(model, torch.float32, only_trainable=True)


def _cast(
    model: Any,
    dtype: torch.dtype,
    *,
    only_trainable: bool = False,
) -> None:
    """Replace parameters and buffers, or trainable parameters alone: fake parameters refuse
    `.data` of another type.
    """
    cast_tensors: dict[int, Any] = {}
    for module in model.modules():
        tables = [module._parameters]
        if not only_trainable:
            tables.append(module._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is None or not tensor.is_floating_point() or tensor.dtype is dtype:
                    continue
                if only_trainable and not tensor.requires_grad:
                    continue
                if id(tensor) not in cast_tensors:
                    cast_tensors[id(tensor)] = _cast_tensor(tensor, dtype)
                table[name] = cast_tensors[id(tensor)]


def _cast_tensor(tensor: Any, dtype: torch.dtype) -> Any:
    cast = tensor.detach().to(dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(cast, requires_grad=tensor.requires_grad)
    return cast


# 5. The ledger.


@all_entered
def collectives_tracked(tracker: Any) -> Iterator[AbstractContextManager[None]]:
    """Wrap torch's functions whose tensors are not recorded as they are made."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import _fsdp_param_group as param_group

    # DTensor's shape propagation is hidden: it runs operations on tensors of the unsharded size.
    for name in ("_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
        function = getattr(ShardingPropagator, name, None)
        if function is not None:
            yield attribute(ShardingPropagator, name, _inside(tracker.untracked, function))
    # Gathered and reduced buffers are communication, whole parameters included.
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
        function = getattr(param_group, name, None)
        if function is not None:
            wrapped = _inside(lambda: tracker.making("communication"), function)
            yield attribute(param_group, name, wrapped)


def _inside(
    region: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function, run in a region of the tracker."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with region():
            return function(*args, **kwargs)

    return run


def _remove_freed(ledger: Any, end: int | None = None) -> None:
    """Remove freed allocations, of those before `end`: `fully_shard` moves and shards unit by
    unit.
    """
    # 1. Numbers that stay.
    freed = {-event - 1 for event in ledger.events if event < 0}
    live = {event - 1 for event in ledger.events if event > 0} - freed
    kept_numbers = set(live)
    if end is not None:
        kept_numbers.update(range(end, len(ledger.sizes)))

    # 2. Events without the others, and one mark for all of them.
    ledger.events[:] = [event for event in ledger.events if abs(event) - 1 in kept_numbers]
    ledger.live = ledger.peak = sum(ledger.sizes[number] for number in live)
    for mark in ledger.marks:
        mark["event"] = 0
    del ledger.marks[:-1]
