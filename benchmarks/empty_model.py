"""A model folder whose weights have their shapes and no content: a file with holes, read as zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.worker import synthetic


def write_empty_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model folder whose weights take no room on the disk: a file with holes, read as zeros."""
    synthetic.write_model_folder(folder, config)
    header, size = _header(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


def _header(folder: Path) -> tuple[bytes, int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    at, entries = 0, {"__metadata__": {"format": "pt"}}
    for name, shape in _parameters(model):
        end = at + 2 * shape.numel()
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}  # type: ignore[dict-item]
        at = end
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8), at


def _parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and shape of each parameter; a tied one has one name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.shape
