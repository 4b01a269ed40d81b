"""What is known offline: GPUs and popular models' shapes. Data with sources; this is its one loader."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    compute_capability: str | None = None
    """`8.0`: which kernels and which workspaces it gets."""

    multiprocessors: int | None = None
    """Of NVIDIA's, streaming multiprocessors; of AMD's, compute units."""

    bandwidth_gb_per_second: float | None = None
    """Of its own memory, as the vendor states it; GB are 10^9 bytes."""

    tflops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak by dtype, summed in float32: float32 (outside the tensor cores), tf32, float16, bfloat16, float8. A dtype
    that its tensor cores don't take is absent."""

    link: Literal["nvlink", "pcie", "infinity-fabric"] | None = None
    """What connects it to its like in common machines."""

    link_gb_per_second: float | None = None
    """To one peer or to all together, in one direction, as the vendor states it."""

    speed_source: str | None = None
    """The page with these: the vendor's, or a collection's where the vendor has none."""

    probes: bool = True
    """False for what prediction may name but no probe can use (not an NVIDIA GPU)."""

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
    """The public files that the shape was read from, each with the entry in it. Its parameter count agrees with the
    published one."""

    page: str
    """The model's own page, where the whole config.json is; fields that the table lacks follow the family."""

    config: Mapping[str, object]
    """The fields of config.json that decide shape, memory and speed."""

    @property
    def layers(self) -> int:
        """How many blocks its text part has."""
        return self._number("num_hidden_layers", "n_layer")

    @property
    def hidden(self) -> int:
        """The width of its text part."""
        return self._number("hidden_size", "n_embd")

    @property
    def vocabulary(self) -> int:
        return self._number("vocab_size")

    @property
    def context(self) -> int:
        """The longest sequence that its config allows."""
        return self._number("max_position_embeddings", "n_positions")

    def _number(self, *names: str) -> int:
        """The first of these fields that it has: of a model of several kinds of input, in the part for text."""
        inner = self.config.get("text_config")
        config = inner if isinstance(inner, Mapping) else self.config
        value = next(config[name] for name in names if name in config)
        assert isinstance(value, int)
        return value


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
