"""Quantised models without weights: the storages and matrix products of the real modules.

Each frozen linear layer is replaced by one with the packed weight and its scales. It computes as
its library does on a GPU: unpack the weight, multiply, free the unpacked weight; the same in the
backward pass. GPTQModel from 2.1 on keeps the unpacked weight of each layer for the backward pass.
Sources: bitsandbytes `autograd/_functions.py` (`MatMul4Bit`, `MatMul8bitLt`) and `functional.py`
(`QuantState`); GPTQModel and AutoGPTQ `triton_utils/dequant.py` (`QuantLinearFunction` of the
second Triton kernel, also used by fms-acceleration's accelerated-peft) and `qlinear/torch.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import releases
from . import Untraceable
from .patching import all_entered, swapped

BLOCK, NESTED_BLOCK = 64, 256
"""Weights per scale, and scales per nested scale: bitsandbytes' defaults on CUDA."""


def quantise(model: Any, spec: Mapping[str, Any]) -> None:
    """Replace the linear layers that the library quantises, on meta and before adapters."""
    settings = spec["model"]
    kind = kind_of(settings)
    if kind is None:
        return
    skipped = _unquantised(model, settings)
    dtype = getattr(torch, settings["dtype"])
    options = dict(settings)
    if kind == "gptq":
        configured = getattr(model.config, "quantization_config", None) or {}
        options.setdefault(
            "group_size", configured.get("group_size", 128)
        )  # rows of a weight per scale
        # From 2.1 on GPTQModel's Triton layer, while it trains, multiplies as its torch layer does
        # (https://github.com/ModelCloud/GPTQModel/pull/1401). Without an installed release today's
        # is assumed.
        options["trains_by_torch"] = releases.release("gptqmodel") >= (2, 1)
    replaced = {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and not any(name == skip or name.startswith(f"{skip}.") for skip in skipped)
    }
    with _disable_current_modes():  # a fake tensor cannot be a bitsandbytes parameter
        for name, module in replaced.items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _KINDS[kind](module, dtype, options))
    _mark_quantised(model, kind)


@all_entered
def unpacked_by_peft() -> Iterator[AbstractContextManager[None]]:
    """Let peft unpack these weights too, as DoRA does: it recognises packed weights by class."""

    def or_in_full(unpack: Any) -> Any:
        return lambda module: module.in_full() if isinstance(module, _Quantised) else unpack(module)

    for names in [vars(sys.modules[name]) for name in sys.modules if name.startswith("peft.")]:
        if callable(unpack := names.get("dequantize_module_weight")):
            yield swapped(names, "dequantize_module_weight", or_in_full(unpack))


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Return `4bit`, `8bit` or `gptq`; None for a model loaded as it is."""
    if settings.get("gptq_bits"):
        return "gptq"
    return (
        "4bit" if settings.get("load_in_4bit") else "8bit" if settings.get("load_in_8bit") else None
    )


def _unquantised(model: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return the modules that stay in full precision: the output embedding and those that share
    its weight.
    """
    skipped = settings.get("llm_int8_skip_modules")
    if skipped:
        return list(skipped)
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head and head is not None]
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    weights = [*tied, *(tied.values() if isinstance(tied, dict) else ())]
    return names + [str(name).removesuffix(".weight") for name in weights]


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
            model.num_parameters = lambda *_, **__: (
                0
            )  # transformers' own count looks for bitsandbytes' kinds of parameters
    support = {"is_trainable": True, "is_qat_trainable": False, "is_compileable": False}
    model.hf_quantizer = SimpleNamespace(**support, quantization_config=None)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """Unpack, multiply, free. Nothing is saved for the backward pass but the packed weight,
    which is live anyway.
    """

    @staticmethod
    def forward(ctx: Any, values: Any, layer: Any, bias: Any) -> Any:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return torch.nn.functional.linear(values, layer.unpacked(values.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        bias = (
            gradient.sum(tuple(range(gradient.dim() - 1)), dtype=ctx.bias_dtype)
            if ctx.needs_input_grad[2]
            else None
        )
        values = (
            torch.matmul(gradient, ctx.layer.unpacked(gradient.dtype))
            if ctx.needs_input_grad[0]
            else None
        )
        return values, None, bias


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


def _empty_layer(base: Any, source: Any) -> Any:
    """Return a layer of this class with the source's sizes and bias, without tensors."""

    class QuantisedLinear(_Quantised, base): ...  # type: ignore[misc]

    layer = QuantisedLinear.__new__(QuantisedLinear)
    torch.nn.Module.__init__(layer)
    layer.in_features, layer.out_features = source.in_features, source.out_features
    layer.bias = source.bias
    if source.bias is not None:
        source.bias.requires_grad_(False)
    layer.source_cls = type(source)
    return layer


def _frozen(packed: Any, **_: Any) -> Any:
    return torch.nn.Parameter(packed, requires_grad=False)


def _hold(layer: Any, name: str, *shape: int, dtype: torch.dtype) -> None:
    layer.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)


def statistics(model: Any) -> list[Any]:
    """Return what bitsandbytes computes beside the weights while these are loaded. GPTQ's is in
    the checkpoint.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _Quantised) and module.kind != "gptq"
    ]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def as_read(module: Any) -> Any:
    """Return the weight as bitsandbytes receives it from the checkpoint, to pack it into 4 bits;
    None for other modules.
    """
    if not (
        isinstance(module, _Quantised)
        and module.kind == "4bit"
        and module.weight.device.type == "meta"
    ):
        return None
    return torch.empty(
        (module.out_features, module.in_features), dtype=module.unpacked_dtype, device="cpu"
    )


class _Quantised(torch.nn.Module):  # type: ignore[misc]
    """Linear layer with a packed weight; `kind` selects how it multiplies."""

    kind = ""  # `4bit`, `8bit` or `gptq`

    def forward(self, x: Any) -> Any:
        return getattr(self, f"_{self.kind}")(x)

    def unpacked(self, dtype: torch.dtype) -> Any:
        """Return the unpacked weight, live until the product is done; nested scales are unpacked
        first.
        """
        if getattr(self, "absmax_of_absmax", None) is not None:
            torch.empty(self.absmax.shape, dtype=torch.float32, device=self.absmax.device)
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=self.unpacked_dtype or dtype, device=self.weight.device).to(
            dtype
        )

    def in_full(self) -> Any:
        """Return the weight as peft unpacks it, to take a norm."""
        if self.kind == "8bit":
            return self.weight * self.SCB.view(-1, 1) * (1.0 / 127.0)
        return self.unpacked(self.unpacked_dtype or self.scales.dtype)

    def _4bit(self, x: Any) -> Any:
        compute = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(compute)
        return _Product.apply(x.to(compute), self, bias).to(x.dtype)

    def _gptq(self, x: Any) -> Any:
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

    def _8bit(self, x: Any) -> Any:
        return _Product8.apply(x, self, self.bias if self.bias is None else self.bias.to(x.dtype))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.Module.to(self, *args, **kwargs)


class _Product8(torch.autograd.Function):  # type: ignore[misc]
    """`MatMul8bitLt` for frozen weights, without outlier columns."""

    @staticmethod
    def forward(ctx: Any, values: Any, layer: Any, bias: Any) -> Any:
        flat = values.reshape(-1, values.shape[-1])
        ctx.layer, ctx.shape = layer, values.shape
        half = flat.to(torch.float16)
        packed = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
        scales = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
        if layer.threshold:
            outliers = half.abs() >= layer.threshold
            del outliers
        del half
        weight, rows = layer.weight, flat.shape[0]
        multiplies = rows > 16
        whole = (
            torch._int_mm(packed, weight.t())
            if multiplies
            else torch.empty(rows, weight.shape[0], dtype=torch.int32)
        )
        out = torch.empty(whole.shape, dtype=torch.float16, device=flat.device)
        del whole, packed, scales
        if bias is not None and bias.dtype is not torch.float16:
            out.add_(bias)
        ctx.values = flat if ctx.needs_input_grad[0] else None  # saved outside the graph, as there
        return out.to(values.dtype).reshape(*values.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        flat = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        weight = ctx.layer.weight.to(ctx.values.dtype, copy=True).mul_(
            ctx.layer.SCB.unsqueeze(1).mul(1.0 / 127.0)
        )
        return torch.matmul(flat.to(ctx.values.dtype), weight).view(ctx.shape), None, None


def _as_4bit(source: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    layer = _empty_layer(_of_bitsandbytes("Linear4bit", torch.nn.Linear), source)
    count = source.in_features * source.out_features
    stored = getattr(torch, str(options.get("bnb_4bit_quant_storage") or "uint8"))
    packed = torch.empty(math.ceil(count / 2 / stored.itemsize), 1, dtype=stored, device="meta")
    nested = bool(
        options.get("bnb_4bit_use_double_quant", options.get("use_bnb_nested_quant", False))
    )
    layer.kind, layer.unpacked_dtype = "4bit", dtype
    layer.compute_dtype = getattr(
        torch, str(options.get("bnb_4bit_compute_dtype") or options["dtype"])
    )
    layer.compute_type_is_set = True
    layer.quant_type = str(options.get("bnb_4bit_quant_type") or "nf4")
    layer.compress_statistics, layer.quant_state, layer.quant_storage = nested, None, stored
    layer.weight = _of_bitsandbytes("Params4bit", _frozen)(
        packed,
        requires_grad=False,
        compress_statistics=nested,
        quant_type=layer.quant_type,
        bnb_quantized=True,
    )
    blocks = math.ceil(count / BLOCK)
    _hold(layer, "absmax", blocks, dtype=torch.uint8 if nested else torch.float32)
    _hold(layer, "code", 16, dtype=torch.float32)
    if nested:
        _hold(layer, "absmax_of_absmax", math.ceil(blocks / NESTED_BLOCK), dtype=torch.float32)
        _hold(layer, "code_of_absmax", 256, dtype=torch.float32)
        _hold(layer, "offset", dtype=torch.float32)
    return layer


def _as_8bit(source: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    layer = _empty_layer(_of_bitsandbytes("Linear8bitLt", torch.nn.Linear), source)
    layer.kind, layer.unpacked_dtype = "8bit", None
    layer.threshold = float(options.get("llm_int8_threshold", 6.0))
    packed = torch.empty(source.out_features, source.in_features, dtype=torch.int8, device="meta")
    layer.weight = _of_bitsandbytes("Int8Params", _frozen)(
        packed, requires_grad=False, has_fp16_weights=False
    )
    _hold(layer, "SCB", source.out_features, dtype=torch.float32)
    # Attributes of `MatmulLtState` that peft reads.
    state = {"has_fp16_weights": False, "memory_efficient_backward": False, "CB": None, "SCB": None}
    layer.state, layer.index = SimpleNamespace(threshold=layer.threshold, **state), None
    return layer


def _as_gptq(source: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """Pack along the input, as AutoGPTQ and GPTQModel do."""
    layer = _empty_layer(torch.nn.Linear, source)
    bits, group = int(options["gptq_bits"]), int(options["group_size"])
    rows = source.in_features if group == -1 else group
    groups = math.ceil(source.in_features / rows)
    layer.kind, layer.unpacked_dtype, layer.bits = "gptq", None, bits
    layer.trains_by_torch = options["trains_by_torch"]
    packed = torch.empty(
        source.in_features * bits // 32, source.out_features, dtype=torch.int32, device="meta"
    )
    layer.weight = _frozen(packed)
    _hold(layer, "qzeros", groups, source.out_features * bits // 32, dtype=torch.int32)
    _hold(layer, "scales", groups, source.out_features, dtype=torch.float16)
    _hold(layer, "g_idx", source.in_features, dtype=torch.int32)
    return layer


_KINDS = {"4bit": _as_4bit, "8bit": _as_8bit, "gptq": _as_gptq}
