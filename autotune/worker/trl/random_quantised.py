"""Random model in 4 bits without weights on disk, drawn and quantised layer by layer.

transformers quantises while it reads a checkpoint. Without one, the same layers of bitsandbytes
replace the same modules, so memory and speed are those of the real model. At most one layer is
unquantised at a time.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def build(folder: Path, quantised: Any, *, dtype: Any, place: str, trust_remote_code: bool) -> Any:
    """Build the model. `quantised` is transformers' BitsAndBytesConfig for a checkpoint."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    _quantise_layers(model, quantised, dtype, place)
    _fill_the_rest(model, dtype, place)
    _mark_as_quantised(model, quantised)
    return model


def _quantise_layers(model: Any, quantised: Any, dtype: Any, place: str) -> None:
    """Quantise all linear layers except the head, which transformers leaves out, too."""
    import torch

    head = model.get_output_embeddings()
    linears = [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head]
    for name, module in linears:
        model.set_submodule(name, _quantised(module, quantised, dtype, place, float(model.config.initializer_range)))


def _quantised(linear: Any, quantised: Any, dtype: Any, place: str, deviation: float) -> Any:
    import torch

    nn: Any = importlib.import_module("bitsandbytes.nn")

    with torch.device("meta"):
        made = nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, quantised.bnb_4bit_compute_dtype,
            compress_statistics=quantised.bnb_4bit_use_double_quant, quant_type=quantised.bnb_4bit_quant_type,
            quant_storage=quantised.bnb_4bit_quant_storage,
        )  # fmt: skip
    drawn = torch.empty(linear.weight.shape, dtype=dtype, device=place).normal_(std=deviation)
    made.weight = nn.Params4bit(
        drawn, requires_grad=False, compress_statistics=quantised.bnb_4bit_use_double_quant,
        quant_type=quantised.bnb_4bit_quant_type, quant_storage=quantised.bnb_4bit_quant_storage, module=made,
    ).to(place)  # fmt: skip
    if linear.bias is not None:
        made.bias = torch.nn.Parameter(torch.zeros(linear.bias.shape, dtype=dtype, device=place), requires_grad=False)
    return made


def _fill_the_rest(model: Any, dtype: Any, place: str) -> None:
    """Fill embeddings, norms and the head in the model's precision; tied parameters stay tied."""
    import torch

    deviation, made = float(model.config.initializer_range), {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                new = torch.ones(parameter.shape, dtype=dtype, device=place)
                filled = new.normal_(std=deviation) if parameter.dim() > 1 else new.zero_() if name == "bias" else new
                made[id(parameter)] = torch.nn.Parameter(filled)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(place) if buffer is not None else None


def _mark_as_quantised(model: Any, quantised: Any) -> None:
    """Set the attributes by which transformers, PEFT and TRL recognise a model loaded in 4 bits."""
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    model.config.quantization_config = quantised
    model.hf_quantizer = AutoHfQuantizer.from_config(quantised, pre_quantized=False)
    model.is_quantized = model.is_loaded_in_4bit = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
