"""A model folder whose weights have their shapes and no content: a file with holes, read as
zeros.
"""

from __future__ import annotations

import array
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.worker import synthetic

BYTES = {"BF16": 2, "F16": 2, "I32": 4}

Tensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, type in safetensors' words, shape, and content where it is not zeros."""


def write_empty_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model folder whose weights take no room on the disk: a file with holes, read as
    zeros.

    With a `quantization_config` of GPTQ the layers have its packed tensors.
    """
    synthetic.write_model_folder(folder, config)
    at, contents = 0, {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, kind, shape, content in _tensors(folder, config.get("quantization_config")):
        end = at + BYTES[kind] * math.prod(shape)
        entries[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        contents[at], at = content, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
        for offset, content in contents.items():
            file.seek(8 + len(text) + offset)
            file.write(content)


def _tensors(folder: Path, quantised: Mapping[str, Any] | None) -> Iterator[Tensor]:
    """Yield each tensor of the checkpoint; a tied one has one name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    packed: dict[str, Any] = {}
    if quantised and quantised["quant_method"] == "gptq":
        head = model.get_output_embeddings()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                packed[f"{name}.weight"] = module
    for name, parameter in model.named_parameters():
        if name in packed and quantised:
            yield from _packed(
                name.removesuffix(".weight"),
                packed[name],
                int(quantised["bits"]),
                int(quantised["group_size"]),
            )
        else:
            yield name, "BF16", tuple(parameter.shape), b""


def _packed(
    name: str,
    layer: Any,
    bits: int,
    group: int,
) -> Iterator[Tensor]:
    """Yield a linear layer's tensors in a checkpoint of GPTQ, packed along the input; each
    input's group is not zero.
    """
    groups, per_word = layer.in_features // group, 32 // bits
    yield f"{name}.qweight", "I32", (layer.in_features // per_word, layer.out_features), b""
    yield f"{name}.qzeros", "I32", (groups, layer.out_features // per_word), b""
    yield f"{name}.scales", "F16", (groups, layer.out_features), b""
    of_input = array.array("i", (at // group for at in range(layer.in_features)))
    yield f"{name}.g_idx", "I32", (layer.in_features,), of_input.tobytes()
