"""FSDP2 on one rank of a group that only pretends: torch's own `fully_shard`, as the installed accelerate applies it.

Nothing is sent, so one process stands for one rank. What FSDP2 keeps alive until the next all-gather or reduce-scatter it
keeps by plain references, on any device, so a fake cpu rank holds what a CUDA rank holds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from . import Untraceable

POLICY = "TRANSFORMER_BASED_WRAP"
"""What transformers asks accelerate for where the user names no other policy."""


def wanted(spec: Mapping[str, Any]) -> bool:
    return (spec.get("sharding") or {}).get("kind") == "fsdp2"


@contextmanager
def process_group(spec: Mapping[str, Any], *, rank: int = 0) -> Iterator[None]:
    """One rank of a group without others, for as long as the trace takes; enter it before any fake mode."""
    if not wanted(spec):
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise Untraceable("a process group exists already in this process, and FSDP2 is traced under one of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(spec["sharding"]["ranks"]))
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: Any, spec: Mapping[str, Any], tracker: Any) -> Any:
    """The model as accelerate shards it. What was whole only on the host is taken out of the book again."""
    if not wanted(spec):
        return _cast_whole(model, spec)
    _leave_out_shape_propagation(tracker)
    _call_it_communication()
    # Parameters are swapped for sharded ones under the same names; the whole ones go when nobody holds them.
    model = prepare(model, spec)
    gc.collect()
    if spec.get("device") == "cuda":
        _forget_what_is_gone(tracker.ledger)
    else:
        tracker._workspaces.update(_inside_gloo())
    if any(not parameter.requires_grad for parameter in model.parameters()):
        tracker.call_it([parameter for parameter in model.parameters() if parameter.requires_grad], "adapters")
    return model


def _inside_gloo() -> dict[Any, Any]:
    """On a CPU it is gloo that gathers and reduces: into a buffer of the whole that is its own."""
    operations = torch.ops.c10d
    return {
        operations._allgather_base_.default: lambda args, kwargs, out: args[0].numel() * args[0].element_size(),
        operations._reduce_scatter_base_.default: lambda args, kwargs, out: args[1].numel() * args[1].element_size(),
    }


def prepare(model: Any, spec: Mapping[str, Any]) -> Any:
    """accelerate's own preparation, on whatever process group there is: fake tensors and real ones alike."""
    try:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    except ImportError:
        return _layer_by_layer(model, spec)
    plugin = _plugin(model, spec)
    if plugin.activation_checkpointing:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac

        plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(_accelerator(plugin, spec), model)
    _upcast_trainable(model, spec)
    return fsdp2_prepare_model(_accelerator(plugin, spec), model)


def mixed_precision(spec: Mapping[str, Any]) -> str:
    """In accelerate's word: `no`, `bf16` or `fp16`."""
    settings = spec.get("settings") or {}
    return "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "no"


def autocasts(spec: Mapping[str, Any]) -> bool:
    """Whether accelerate runs the forward under autocast; FSDP2's policy and DeepSpeed's engine cast by themselves."""
    kind = (spec.get("sharding") or {}).get("kind", "none")
    return kind != "fsdp2" and not kind.startswith("zero")


def _cast_whole(model: Any, spec: Mapping[str, Any]) -> Any:
    """DeepSpeed trains in one dtype: its engine casts whatever floats, adapters among them, before it makes its masters.
    FSDP1 under a mixed precision policy gathers every unit in that dtype."""
    kind, precision = (spec.get("sharding") or {}).get("kind", "none"), mixed_precision(spec)
    if kind == "fsdp1":
        precision = str((spec["sharding"].get("options") or {}).get("mixed_precision", "no"))
    if not (kind.startswith("zero") or kind == "fsdp1") or precision == "no":
        return model
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    made: dict[int, Any] = {}

    def cast(tensor: Any, parameter: bool) -> Any:
        if not tensor.is_floating_point() or tensor.dtype is dtype:
            return tensor
        if id(tensor) not in made:
            new = tensor.detach().to(dtype)
            made[id(tensor)] = torch.nn.Parameter(new, requires_grad=tensor.requires_grad) if parameter else new
        return made[id(tensor)]

    # Every tensor is replaced rather than given other data, which fake parameters refuse.
    for module in model.modules():
        module._parameters.update({name: cast(held, True) for name, held in module._parameters.items() if held is not None})
        module._buffers.update({name: cast(held, False) for name, held in module._buffers.items() if held is not None})
    return model


def _plugin(model: Any, spec: Mapping[str, Any]) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    options = _options(spec)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=str(options.get("auto_wrap_policy", POLICY)),
        transformer_cls_names_to_wrap=options.get("transformer_layer_cls_to_wrap"),
        min_num_params=options.get("min_num_params"),
        reshard_after_forward=_truth(options.get("reshard_after_forward", True)),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=_truth(options.get("activation_checkpointing", False)),
    )
    if (precision := mixed_precision(spec)) != "no":
        plugin.set_mixed_precision(precision)
    if hasattr(model, "active_peft_config"):
        _as_for_adapters(model, plugin)
    return plugin


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The user's `fsdp_config`, with and without its prefix, and what the question itself says."""
    given = (spec.get("settings") or {}).get("fsdp_config")
    options = {name.removeprefix("fsdp_"): value for name, value in given.items()} if isinstance(given, Mapping) else {}
    options.update((spec["sharding"].get("options") or {}).items())
    if _truth(options.get("cpu_offload", options.get("offload_params", False))):
        raise Untraceable(
            "FSDP2 with parameters offloaded to the host cannot be followed: its shards would be seen on the device"
        )
    return options


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes")


def _as_for_adapters(model: Any, plugin: Any) -> None:
    """transformers' Trainer gives the plugin another policy for a PEFT model; where it moved to differs between versions."""
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    try:
        from transformers.distributed.fsdp import update_fsdp_plugin_peft
    except ImportError:
        try:
            from transformers.integrations.fsdp import update_fsdp_plugin_peft
        except ImportError:
            from peft.utils.other import fsdp_auto_wrap_policy

            plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
            return
    update_fsdp_plugin_peft(model, accelerator)


def _accelerator(plugin: Any, spec: Mapping[str, Any]) -> Any:
    """What accelerate's preparation reads of an Accelerator."""
    mesh = _mesh(int(spec["sharding"]["ranks"]))
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed_precision(spec),
        is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh={("all",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["all"]),
    )


def _mesh(ranks: int) -> Any:
    """A mesh of real tensors: under a fake mode its ranks could not be read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return init_device_mesh("cpu", (ranks,))


def _upcast_trainable(model: Any, spec: Mapping[str, Any]) -> None:
    """accelerate trains on float32 masters under mixed precision, and gives `.data` another dtype for it, which a fake
    parameter does not take: so the parameter is replaced here first."""
    if mixed_precision(spec) == "no" or not _any_fake(model):
        return
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.requires_grad or parameter.dtype is torch.float32:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(parameter.detach().to(torch.float32))
            module._parameters[name] = made[id(parameter)]


def _any_fake(model: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(parameter.data, FakeTensor) for parameter in model.parameters())


def _layer_by_layer(model: Any, spec: Mapping[str, Any]) -> Any:
    """An accelerate that knows no FSDP2 beside a framework that uses it: a unit per decoder layer, and the rest as root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision(spec))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    how = {"mesh": _mesh(int(spec["sharding"]["ranks"])), "mp_policy": policy}
    names = set(getattr(model, "_no_split_modules", None) or ())
    _upcast_trainable(model, spec)
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, **how, reshard_after_forward=_truth(_options(spec).get("reshard_after_forward", True)))
    return fully_shard(model, **how)


_SEEN_BY: list[Any] = []
"""The tracker of the trace that runs: the patch below outlives a trace, and asks for the latest."""


def _leave_out_shape_propagation(tracker: Any) -> None:
    """DTensor finds out shapes by running an operation on throw-away tensors of the whole, unsharded size."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    _SEEN_BY[:] = [tracker]
    for name in ("_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
        plain = getattr(ShardingPropagator, name, None)
        if plain is not None and not hasattr(plain, "unseen"):
            setattr(ShardingPropagator, name, _unseen(plain))


def _unseen(plain: Any) -> Any:
    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _SEEN_BY[-1].not_looking():
            return plain(*args, **kwargs)

    propagate.unseen = True  # type: ignore[attr-defined]
    return propagate


def _call_it_communication() -> None:
    """What is gathered, and what is reduced; whole parameters among it, for they are there for as long as they are gathered."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import _fsdp_param_group as group
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
        plain = getattr(group, name, None)
        if plain is not None and not hasattr(plain, "communication"):
            setattr(group, name, _communication(plain))


def _communication(plain: Any) -> Any:
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not _SEEN_BY:
            return plain(*args, **kwargs)
        with _SEEN_BY[-1].making("communication"):
            return plain(*args, **kwargs)

    collective.communication = True  # type: ignore[attr-defined]
    return collective


def _forget_what_is_gone(ledger: Any) -> None:
    """The whole parameters were never on the GPU: `fully_shard` moves a unit there and cuts it before the next."""
    live = {entry - 1 for entry in ledger.events if entry > 0} - {-entry - 1 for entry in ledger.events if entry < 0}
    ledger.events[:] = [entry for entry in ledger.events if abs(entry) - 1 in live]
    ledger.live = ledger.peak = sum(ledger.sizes[number] for number in live)
    for mark in ledger.marks:
        mark["event"] = 0
    del ledger.marks[:-1]
