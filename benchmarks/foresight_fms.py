"""Plugins of fms-acceleration, applied to a model on meta: the code that its benchmark rows were
measured with.

Runs in the environment that the rows name, as patches of a generic step. The plugins' real code is
called (its model rules, its quantised layers, its ways of preparing a model). Two parts that need a
GPU are replaced: Triton kernels, which write into tensors that their callers allocate, and
`device="cuda"`, which is the traced device here.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

KERNELS = {"fast_loss": True, "fast_rms_layernorm": True, "fast_rope_embeddings": True}
"""`foak-fast-kernels` in its sample configuration."""

ROUTER = "block_sparse_moe.gate"
"""Layer that AutoGPTQ leaves unquantised in Mixtral."""

UNUSED = ("datasets",)

CHECKPOINTING = {"use_reentrant": True}
"""The plugins pass an empty dict, for which the torch of that time took the reentrant kind."""


def augment(model: Any, spec: Any) -> Any:
    """Quantised layers, preparation, adapters and fused kernels, in the framework's order."""
    settings = spec["settings"]["fms"]
    stand_in_for_a_gpu()
    if settings["quantised"] == "auto_gptq":
        model = with_gptq(model, settings)
    elif settings["quantised"] == "bitsandbytes":
        model = with_bitsandbytes(model, settings)
    if settings["kernels"]:
        model = with_kernels(model, settings)
    return model


# What only a GPU has.


class _NoKernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Library:
    """bitsandbytes' compiled functions: they write into what was allocated for them."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _TorchOnTheTracedDevice:
    """Wrapper of torch in which `device="cuda"` is the traced device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, device: Any = None, **kwargs: Any) -> Any:
        return torch.empty(*sizes, device=None if device == "cuda" else device, **kwargs)

    def addmm(
        self,
        input: Any,
        mat1: Any,
        mat2: Any,
        *,
        out: Any = None,
        alpha: Any = 1,
        beta: Any = 1,
    ) -> Any:
        """Product into a given tensor, which allocates nothing else. A fake tensor can't carry the
        factor, a tensor with one number."""
        if out is None:
            return torch.addmm(input, mat1, mat2, alpha=alpha, beta=beta)
        out.add_(torch.empty((), dtype=out.dtype))
        torch.mm(mat1.to("meta"), mat2.to("meta"))
        return out


class _Unused(ModuleType):
    """A package that is imported beside what is called, and not called itself: the plugins' data
    handling.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_a_gpu() -> None:

    for name in UNUSED:
        sys.modules[name] = _Unused(name)

    library: Any = importlib.import_module("bitsandbytes.functional")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    library.lib = _Library()
    library.get_ptr = lambda tensor: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    for name in (
        "fms_acceleration_foak.framework_plugin_fast_kernels",
        "fms_acceleration_foak.models.granite",
        "fms_acceleration_foak.models.llama",
        "fms_acceleration_foak.models.mistral",
        "fms_acceleration_foak.models.mixtral",
        "fms_acceleration_foak.models.gpt_bigcode",
        "fms_acceleration_peft.gptqmodel.nn_modules.qlinear.qlinear_tritonv2",
        "fms_acceleration_peft.gptqmodel.utils.peft",
    ):
        importlib.import_module(name)
    torch.cuda.is_available = lambda: False
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("fms_acceleration_foak", "fms_acceleration_peft"):
            _without_a_gpu(module)


def _without_a_gpu(module: Any) -> None:
    for name, value in list(vars(module).items()):
        if value is torch:
            vars(module)[name] = _TorchOnTheTracedDevice()
        elif type(value).__module__.startswith("triton.runtime") and hasattr(value, "__getitem__"):
            vars(module)[name] = _NoKernel()


# The plugins.


def with_kernels(model: Any, fms_settings: Any) -> Any:
    """FastKernelsAccelerationPlugin, and the patching that the framework does when all is ready."""
    from fms_acceleration.model_patcher import ModelPatcher
    from fms_acceleration_foak.framework_plugin_fast_kernels import FastKernelsAccelerationPlugin

    settings = {
        "base_layer": fms_settings["quantised"] or "auto_gptq",
        "fused_lora": bool(fms_settings["quantised"]),
        **fms_settings["kernels"],
    }
    plugin = FastKernelsAccelerationPlugin({"training": {"fused_ops_and_kernels": settings}})
    if fms_settings["quantised"]:
        model.quantization_method = fms_settings["quantised"]
    ModelPatcher.rules.clear()  # a mixture is traced twice, and a rule may be registered once
    plugin.augmentation(model, SimpleNamespace(bf16=True, fp16=False), modifiable_args=(None,))
    for name, module in list(sys.modules.items()):
        if name.startswith("fms_acceleration_foak"):
            _without_a_gpu(module)
    ModelPatcher.patch(model)
    return model


def with_gptq(model: Any, fms_settings: Any) -> Any:
    """Its own copy of AutoGPTQ's Triton layer in all decoder layers, PEFT's preparation, its own
    adapters.
    """
    from fms_acceleration_peft.gptqmodel.nn_modules.qlinear.qlinear_tritonv2 import QuantLinear
    from fms_acceleration_peft.gptqmodel.utils.peft import get_gptq_peft_model
    from peft import LoraConfig, prepare_model_for_kbit_training

    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear) and not name.endswith(ROUTER):
                with torch.device("meta"):
                    packed = QuantLinear(
                        4,
                        fms_settings["group_size"],
                        module.in_features,
                        module.out_features,
                        module.bias is not None,
                    )
                if fms_settings["sharded"]:
                    _packed_as_parameters(packed)
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, packed)
    model.is_loaded_in_4bit, model.quantization_method = True, "gptq"
    model = prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs=CHECKPOINTING
    )
    with _adapters_on_meta():
        return get_gptq_peft_model(
            SimpleNamespace(model=model, lm_head="lm_head"),
            peft_config=LoraConfig(**fms_settings["adapter"]),
            auto_find_all_linears=False,
            train_mode=True,
        )


def _packed_as_parameters(layer: Any) -> None:
    """Keep the packed tensors as parameters, and view them back: FSDP shards floating-point
    parameters alone.
    """
    for name in ("qweight", "qzeros"):
        packed = getattr(layer, name).view(torch.float16)
        delattr(layer, name)
        layer.register_parameter(name, torch.nn.Parameter(packed, requires_grad=False))


def _adapters_on_meta() -> Any:
    from autotune.worker.tracing import fake_models

    return fake_models.adapters_on_meta()


def with_bitsandbytes(model: Any, fms_settings: Any) -> Any:
    """NF4 layers, then its own preparation, or TRL's where the plugin leaves it to the trainer."""
    from fms_acceleration_peft.framework_plugin_bnb import _prepare_model_for_kbit_training
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    for module in model.modules():
        if hasattr(module, "absmax_of_absmax"):
            module.quant_state = _QuantState(module)
    prepare = (
        prepare_model_for_kbit_training
        if fms_settings["prepared_by_trainer"]
        else _prepare_model_for_kbit_training
    )
    model = prepare(
        model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs=CHECKPOINTING
    )
    with _adapters_on_meta():
        model = get_peft_model(model, LoraConfig(**fms_settings["adapter"]))
    if fms_settings["prepared_by_trainer"] and fms_settings["bf16"]:
        _norms_and_head_in_bf16(model)
    return model


class _QuantState:
    """bitsandbytes' own, as the fused kernels read it: from the layer that holds the scales."""

    blocksize, offset = 64, 0.0

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.shape = torch.Size((layer.out_features, layer.in_features))
        self.dtype = layer.unpacked_dtype

    @property
    def absmax(self) -> Any:
        return self._layer.absmax

    @property
    def state2(self) -> Any:
        return SimpleNamespace(
            absmax=self._layer.absmax_of_absmax,
            code=self._layer.code_of_absmax,
            blocksize=256,
        )


def _norms_and_head_in_bf16(model: Any) -> None:
    from trl.trainer.utils import peft_module_casting_to_bf16

    peft_module_casting_to_bf16(model)
