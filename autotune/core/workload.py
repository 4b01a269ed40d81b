"""Workload: the fixed part of a training job, without the searched knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from autotune.core.candidate import KnobValue, fingerprint
from autotune.core.dataset import Images
from autotune.core.token_lengths import TokenLengths
from autotune.core.user_launch import LaunchScript
from autotune.core.user_script import UserScript

Tuning = Literal["full", "lora", "qlora"]
Weights = Literal["random", "real"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Base model: its shape, and its weights where available."""

    name: str  # as typed, or the hub id of a short name
    config: Mapping[str, object]  # content of config.json
    folder: Path | None  # folder with config.json (and weights); None: only the config is known
    origin: str  # source of the config, for display: `local folder`, `catalogue`, `hub cache`, the hub

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model's shape."""
        return fingerprint(self.config)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data and fixed settings of a training job."""

    model: Model
    method: str = "grpo"
    framework: str = "trl"
    python: Path  # interpreter of the training environment
    tuning: Tuning = "lora"
    weights: Weights = "random"  # random: no download; memory and speed are the same
    global_batch: int | None = None  # completions per optimizer step; None: free
    typical_completion_length: int | None = None  # length used for ranking by speed, where known
    completion_lengths: TokenLengths | None = None  # lengths that occur, where known
    prompt_lengths: TokenLengths | None = None  # of prompts, where known
    images: Images | None = None  # of each row; None: texts only
    dataset: str | None = None  # name or path, as the framework loads it; None: synthetic prompts
    config_file: Path | None = None  # the user's configuration file
    held: Mapping[str, KnobValue] = field(default_factory=dict)  # by --config and flags
    # Rest of the user's configuration (dataset names, rewards, lists), passed through
    user_settings: Mapping[str, object] = field(default_factory=dict)
    stated: Mapping[str, object] = field(default_factory=dict)  # what the configuration file itself states
    # Part of `held` that neither flags nor file state: the framework's defaults, with which the file trains
    defaults: Mapping[str, KnobValue] = field(default_factory=dict)
    launch: LaunchScript | None = None  # the user's shell script, in place of a configuration file
    script: UserScript | None = None  # the user's training script, in place of a configuration file
    trust_remote_code: bool = False
    seed: int = 42
