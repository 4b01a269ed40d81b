"""What is known offline: GPUs and popular models' shapes. Data with sources; this is its one loader."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import msgspec

from autotune.units import MIB


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    """As `--gpus` takes it; where a family comes in several sizes, the size is part of it."""

    memory_mib: int
    """The memory a job can see on it."""

    seen_by: Literal["nvidia-smi", "torch", "nominal"]
    """Who reported that memory; `nominal` is the vendor's round figure, for want of a report."""

    source: str
    """A public page with that figure."""

    names: tuple[str, ...]
    """Words in the driver's name for it, lower case: any one tells it."""

    family: str | None = None
    """The name that several sizes share, and that is therefore ambiguous: `A100`."""

    aliases: tuple[str, ...] = ()
    """Other ways people write it."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One model's shape."""

    ids: tuple[str, ...]
    """Hub ids that share this config; the first is the one that its source shows."""

    parameters_billions: float
    """As its authors state it: a test recomputes it from the config."""

    source: str
    """The public table that the shape was read from; its parameter count agrees with the published one."""

    page: str
    """The model's own page, where the whole config.json is; fields that the table lacks follow the family."""

    config: Mapping[str, object]
    """The fields of config.json that decide shape, memory and speed."""


@dataclass(frozen=True, kw_only=True)
class _GpuFile:
    schema: Literal[1]
    gpus: tuple[Gpu, ...]


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Every known GPU, in the file's order."""
    import msgspec.yaml

    text = resources.files(__name__).joinpath("gpus.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=_GpuFile).gpus


@functools.cache
def models() -> tuple[KnownModel, ...]:
    """Every known model, by file name."""
    folder = resources.files(__name__).joinpath("models")
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(msgspec.convert(json.loads(entry.read_text()), KnownModel) for entry in files)
