"""Workload: what is to be trained, apart from the knobs that are searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from autotune.candidate import KnobValue, fingerprint
from autotune.own_script import OwnScript

Tuning = Literal["full", "lora", "qlora"]
Weights = Literal["random", "real"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The base model: its shape always, its weights perhaps."""

    name: str
    """As the user wrote it, or the hub id that a short name stands for."""

    config: Mapping[str, object]
    """The model's own config.json."""

    folder: Path | None
    """A local folder with config.json (and, for `--weights real`, the weights); None where only the config is known."""

    origin: str
    """Where the config came from, in words that are shown: `local folder`, `catalogue`, `hub cache`."""

    @cached_property
    def fingerprint(self) -> str:
        """Of its shape."""
        return fingerprint(self.config)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The question's fixed part. What moves is in the space."""

    model: Model
    method: str = "grpo"
    framework: str = "trl"
    python: Path
    """The interpreter of the training environment."""

    tuning: Tuning = "lora"
    weights: Weights = "random"
    """Random weights on the config's shape need no download; memory and speed are the same, generated lengths are not."""

    global_batch: int | None = None
    """Completions per optimizer step over all ranks, where held; None lets batch x accumulation move freely."""

    typical_completion_length: int | None = None
    """The length that speed is ranked by, where the user knows it."""

    dataset: str | None = None
    """Dataset name or path in the framework's own words; None lets a probe make its own prompts."""

    config_file: Path | None = None
    """The user's own configuration file, if one was given."""

    held: Mapping[str, KnobValue] = field(default_factory=dict)
    """The user's own settings, from --config and flags, which every candidate carries as they are."""

    user_settings: Mapping[str, object] = field(default_factory=dict)
    """Everything else of the user's configuration (dataset names, rewards, lists), handed on untouched."""

    script: OwnScript | None = None
    """The user's own training script, where it takes the place of a configuration file."""

    trust_remote_code: bool = False
    seed: int = 42
