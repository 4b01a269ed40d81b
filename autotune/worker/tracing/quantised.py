"""Quantised models without weights: the storages and matrix products of the real modules.

Each frozen linear layer is replaced by one with the packed weight and its scales. It computes as
its library does on a GPU: unpack the weight, multiply, free the unpacked weight; the same in the
backward pass. GPTQModel from 2.1 on keeps the unpacked weight of each layer for the backward pass.
Sources: bitsandbytes `autograd/_functions.py` (`MatMul4Bit`, `MatMul8bitLt`) and `functional.py`
(`QuantState`); GPTQModel and AutoGPTQ `triton_utils/dequant.py` (`QuantLinearFunction` of the
second Triton kernel, also used by fms-acceleration's accelerated-peft) and `qlinear/torch.py`.

Storages of a weight of n = inputs x outputs numbers:

    4bit   n / 2 bytes, a scale for 64 numbers in float32, the 16 values of the code;
           nested: scales in one byte each, a float32 for 256 of them, a code of 256 values
    8bit   n bytes, a scale per output in float32
    gptq   n x bits / 8 bytes, a zero and a float16 scale per output and group of inputs,
           the group of each input
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import releases
from ..protocol import Settings
from . import Spec, Untraceable
from .patching import all_entered, swapped

WEIGHT_BLOCK = 64
NESTED_BLOCK = 256
"""Weights per scale, and scales per nested scale: bitsandbytes' defaults on CUDA."""

OUTLIER_THRESHOLD = 6.0
DEFAULT_GROUP_SIZE = 128
"""GPTQ: inputs that share a scale."""


# 1. Replacement of a model's layers.


def quantise(model: Any, spec: Spec) -> None:
    """Replace the linear layers that the library quantises, on meta and before adapters."""
    settings = spec["model"]
    kind = kind_of(settings)
    if kind is None:
        return
    options = dict(settings)
    if kind == "gptq":
        configured = getattr(model.config, "quantization_config", None) or {}
        options.setdefault("group_size", configured.get("group_size", DEFAULT_GROUP_SIZE))
        # From 2.1 on GPTQModel's Triton layer, while it trains, multiplies as its torch layer does
        # (https://github.com/ModelCloud/GPTQModel/pull/1401). Without an installed release today's
        # is assumed.
        version = releases.release("gptqmodel")
        options["trains_by_torch"] = version >= (2, 1)

    dtype = getattr(torch, settings["dtype"])
    quantised_layer = _LAYERS[kind]
    with _disable_current_modes():  # a fake tensor cannot be a bitsandbytes parameter
        layers = _quantised_layers(model, settings)
        for name, linear in layers.items():
            parent, _, child = name.rpartition(".")
            layer = quantised_layer(linear, dtype, options)
            setattr(model.get_submodule(parent), child, layer)
    _mark_quantised(model, kind)


@all_entered
def unpacked_by_peft() -> Iterator[AbstractContextManager[None]]:
    """Let peft unpack these weights too, as DoRA does: it recognises packed weights by class."""

    def or_in_full(unpack: Any) -> Any:
        return lambda module: module.in_full() if isinstance(module, _Quantised) else unpack(module)

    for module_name in list(sys.modules):
        if not module_name.startswith("peft."):
            continue
        names = vars(sys.modules[module_name])
        unpack = names.get("dequantize_module_weight")
        if callable(unpack):
            yield swapped(names, "dequantize_module_weight", or_in_full(unpack))


def kind_of(settings: Settings) -> str | None:
    """Return `4bit`, `8bit` or `gptq`; None for a model loaded as it is."""
    if settings.get("gptq_bits"):
        return "gptq"
    if settings.get("load_in_4bit"):
        return "4bit"
    if settings.get("load_in_8bit"):
        return "8bit"
    return None


def _quantised_layers(model: Any, settings: Settings) -> dict[str, Any]:
    """Return the linear layers to quantise, by name."""
    skipped = _unquantised(model, settings)
    prefixes = tuple(f"{name}." for name in skipped)
    layers = {}
    for name, module in model.named_modules():
        is_skipped = name in skipped or name.startswith(prefixes)
        if type(module) is torch.nn.Linear and not is_skipped:
            layers[name] = module
    return layers


def _unquantised(model: Any, settings: Settings) -> list[str]:
    """Return the modules that stay in full precision: the output embedding and those that share
    its weight.
    """
    skipped = settings.get("llm_int8_skip_modules")
    if skipped:
        return list(skipped)
    names = []
    head = model.get_output_embeddings()
    if head is not None:
        names += [name for name, module in model.named_modules() if module is head]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied_weights = [*tied]
    if isinstance(tied, dict):
        tied_weights += tied.values()
    return names + [str(weight).removesuffix(".weight") for weight in tied_weights]


def _mark_quantised(model: Any, kind: str) -> None:
    """Set the attributes by which transformers, peft and TRL recognise a quantised model."""
    model.is_quantized = True
    if kind == "gptq":
        model.quantization_method = "gptq"
    else:
        setattr(model, f"is_loaded_in_{kind}", True)
        model.quantization_method = "bitsandbytes"
        model.is_quantized_training_enabled = True
        if importlib.util.find_spec("bitsandbytes") is None:
            # transformers' own count looks for bitsandbytes' kinds of parameters
            model.num_parameters = lambda *_, **__: 0
    model.hf_quantizer = SimpleNamespace(
        is_trainable=True,
        is_qat_trainable=False,
        is_compileable=False,
        quantization_config=None,
    )


def statistics(model: Any) -> list[Any]:
    """Return what bitsandbytes computes beside the weights while these are loaded. GPTQ's is in
    the checkpoint.
    """
    buffers = []
    for module in model.modules():
        if isinstance(module, _Quantised) and module.kind != "gptq":
            buffers += module.buffers(recurse=False)
    return buffers


def as_read(module: Any) -> Any:
    """Return the weight as bitsandbytes receives it from the checkpoint, to pack it into 4 bits;
    None for other modules.
    """
    if not isinstance(module, _Linear4bit) or module.weight.device.type != "meta":
        return None
    return torch.empty(
        (module.out_features, module.in_features), dtype=module.unpacked_dtype, device="cpu"
    )


# 2. Quantised layers.


class _Quantised(torch.nn.Module):  # type: ignore[misc]
    """Linear layer with a packed weight."""

    kind = ""

    def unpacked(self, dtype: torch.dtype) -> Any:
        """Return the unpacked weight, live until the product is done."""
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=dtype, device=self.weight.device)

    def in_full(self) -> Any:
        """Return the weight as peft unpacks it, to take a norm."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.Module.to(self, *args, **kwargs)


class _Linear4bit(_Quantised):
    """`Linear4bit` of bitsandbytes."""

    kind = "4bit"

    def forward(self, x: Any) -> Any:
        compute_dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(compute_dtype)
        return _Product.apply(x.to(compute_dtype), self, bias).to(x.dtype)

    def unpacked(self, dtype: torch.dtype) -> Any:
        """Return the unpacked weight; nested scales are unpacked first."""
        if self.compress_statistics:
            torch.empty(self.absmax.shape, dtype=torch.float32, device=self.absmax.device)
        return super().unpacked(self.unpacked_dtype).to(dtype)

    def in_full(self) -> Any:
        return self.unpacked(self.unpacked_dtype)


class _Linear8bit(_Quantised):
    """`Linear8bitLt` of bitsandbytes."""

    kind = "8bit"

    def forward(self, x: Any) -> Any:
        bias = self.bias
        if bias is not None:
            bias = bias.to(x.dtype)
        return _Product8.apply(x, self, bias)

    def in_full(self) -> Any:
        return self.weight * self.SCB.view(-1, 1) * (1.0 / 127.0)


class _LinearGptq(_Quantised):
    """Layer of GPTQModel or AutoGPTQ."""

    kind = "gptq"

    def forward(self, x: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        if self.training and self.trains_by_torch:
            unpacked = torch.empty(
                self.in_features, self.out_features, dtype=self.scales.dtype, device=x.device
            )
            product = torch.matmul(flat, unpacked.to(x.dtype))  # autograd keeps the weight
        else:
            product = _Product.apply(flat, self, None)
        out = product.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def in_full(self) -> Any:
        return self.unpacked(self.scales.dtype)


# 3. Products.


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """Unpack, multiply, free. Nothing is saved for the backward pass but the packed weight,
    which is live anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Any,
        layer: Any,
        bias: Any,
    ) -> Any:
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.nn.functional.linear(values, layer.unpacked(values.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        values_gradient = bias_gradient = None
        if ctx.needs_input_grad[2]:
            rows = tuple(range(gradient.dim() - 1))
            bias_gradient = gradient.sum(rows, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            values_gradient = torch.matmul(gradient, ctx.layer.unpacked(gradient.dtype))
        return values_gradient, None, bias_gradient


class _Product8(torch.autograd.Function):  # type: ignore[misc]
    """`MatMul8bitLt` for frozen weights, without outlier columns."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Any,
        layer: Any,
        bias: Any,
    ) -> Any:
        ctx.layer = layer
        ctx.shape = values.shape
        flat = values.reshape(-1, values.shape[-1])
        rows = flat.shape[0]
        device = flat.device
        weight = layer.weight

        # 1. Pack the input.
        half = flat.to(torch.float16)
        packed = torch.empty(flat.shape, dtype=torch.int8, device=device)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        if layer.threshold:
            outliers = half.abs() >= layer.threshold
            del outliers
        del half

        # 2. Multiply in integers; torch's product requires more than 16 rows.
        if rows > 16:
            product = torch._int_mm(packed, weight.t())
        else:
            product = torch.empty(rows, weight.shape[0], dtype=torch.int32)

        # 3. Unpack the result.
        out = torch.empty(product.shape, dtype=torch.float16, device=device)
        del product, packed, scales
        if bias is not None and bias.dtype is not torch.float16:
            out.add_(bias)
        # As in bitsandbytes, the input is saved outside the graph.
        ctx.values = flat if ctx.needs_input_grad[0] else None
        shape = (*values.shape[:-1], weight.shape[0])
        return out.to(values.dtype).reshape(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        dtype = ctx.values.dtype
        layer = ctx.layer
        flat = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        unpacked = layer.weight.to(dtype, copy=True)
        weight = unpacked.mul_(layer.SCB.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(flat.to(dtype), weight).view(ctx.shape), None, None


# 4. Construction of the layers.


def _as_4bit(
    source: Any,
    dtype: torch.dtype,
    options: Settings,
) -> Any:
    # 1. The layer, with the library's options.
    nested = bool(
        options.get("bnb_4bit_use_double_quant", options.get("use_bnb_nested_quant", False))
    )
    storage_dtype = _dtype_of(options.get("bnb_4bit_quant_storage") or "uint8")
    layer_class = _of_bitsandbytes("Linear4bit", torch.nn.Linear)
    layer = _empty_layer(_Linear4bit, layer_class, source)
    layer.unpacked_dtype = dtype
    dtype_name = options.get("bnb_4bit_compute_dtype") or options["dtype"]
    layer.compute_dtype = _dtype_of(dtype_name)
    layer.compute_type_is_set = True
    layer.quant_type = str(options.get("bnb_4bit_quant_type") or "nf4")
    layer.compress_statistics = nested
    layer.quant_state = None
    layer.quant_storage = storage_dtype

    # 2. Its weights, two in a byte.
    count = source.in_features * source.out_features
    length = math.ceil(count / 2 / storage_dtype.itemsize)
    layer.weight = _of_bitsandbytes("Params4bit", _frozen)(
        torch.empty(length, 1, dtype=storage_dtype, device="meta"),
        requires_grad=False,
        compress_statistics=nested,
        quant_type=layer.quant_type,
        bnb_quantized=True,
    )

    # 3. The scale of each block; scales of these scales where they are quantised too.
    blocks = math.ceil(count / WEIGHT_BLOCK)
    _add_buffer(layer, "absmax", blocks, dtype=torch.uint8 if nested else torch.float32)
    _add_buffer(layer, "code", 16, dtype=torch.float32)
    if nested:
        nested_blocks = math.ceil(blocks / NESTED_BLOCK)
        _add_buffer(layer, "absmax_of_absmax", nested_blocks, dtype=torch.float32)
        _add_buffer(layer, "code_of_absmax", 256, dtype=torch.float32)
        _add_buffer(layer, "offset", dtype=torch.float32)
    return layer


def _as_8bit(
    source: Any,
    dtype: torch.dtype,
    options: Settings,
) -> Any:
    layer_class = _of_bitsandbytes("Linear8bitLt", torch.nn.Linear)
    layer = _empty_layer(_Linear8bit, layer_class, source)
    layer.threshold = float(options.get("llm_int8_threshold", OUTLIER_THRESHOLD))
    packed = torch.empty(source.out_features, source.in_features, dtype=torch.int8, device="meta")
    layer.weight = _of_bitsandbytes("Int8Params", _frozen)(
        packed, requires_grad=False, has_fp16_weights=False
    )
    _add_buffer(layer, "SCB", source.out_features, dtype=torch.float32)
    # Attributes of `MatmulLtState` that peft reads.
    layer.state = SimpleNamespace(
        threshold=layer.threshold,
        has_fp16_weights=False,
        memory_efficient_backward=False,
        CB=None,
        SCB=None,
    )
    layer.index = None
    return layer


def _as_gptq(
    source: Any,
    dtype: torch.dtype,
    options: Settings,
) -> Any:
    """Pack along the input, as AutoGPTQ and GPTQModel do."""
    bits = int(options["gptq_bits"])
    group_size = int(options["group_size"])
    if group_size == -1:
        group_size = source.in_features
    inputs = source.in_features
    outputs = source.out_features
    groups = math.ceil(inputs / group_size)
    layer = _empty_layer(_LinearGptq, torch.nn.Linear, source)
    layer.bits = bits
    layer.trains_by_torch = options["trains_by_torch"]
    packed = torch.empty(inputs * bits // 32, outputs, dtype=torch.int32, device="meta")
    layer.weight = _frozen(packed)
    _add_buffer(layer, "qzeros", groups, outputs * bits // 32, dtype=torch.int32)
    _add_buffer(layer, "scales", groups, outputs, dtype=torch.float16)
    _add_buffer(layer, "g_idx", inputs, dtype=torch.int32)
    return layer


_LAYERS: dict[str, Callable[..., Any]] = {"4bit": _as_4bit, "8bit": _as_8bit, "gptq": _as_gptq}


def _empty_layer(
    kind: type[_Quantised],
    base: Any,
    source: Any,
) -> Any:
    """Return a layer of these classes with the source's sizes and bias, without tensors."""

    class QuantisedLinear(kind, base): ...  # type: ignore[misc, valid-type]

    layer = QuantisedLinear.__new__(QuantisedLinear)
    torch.nn.Module.__init__(layer)
    layer.in_features = source.in_features
    layer.out_features = source.out_features
    layer.bias = source.bias
    if source.bias is not None:
        source.bias.requires_grad_(False)
    layer.source_cls = type(source)
    return layer


def _of_bitsandbytes(name: str, otherwise: Any) -> Any:
    """Return bitsandbytes' own class: peft wraps its layers in its own, and does not cast its
    parameters.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return otherwise
    try:
        return getattr(importlib.import_module("bitsandbytes").nn, name)
    except (ImportError, AttributeError, OSError) as error:
        raise Untraceable(
            f"bitsandbytes: cannot be used: {error}. Reinstall or uninstall it."
        ) from error


def _frozen(packed: Any, **_: Any) -> Any:
    return torch.nn.Parameter(packed, requires_grad=False)


def _add_buffer(
    layer: Any,
    name: str,
    *shape: int,
    dtype: torch.dtype,
) -> None:
    layer.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)


def _dtype_of(name: object) -> Any:
    return getattr(torch, str(name))
