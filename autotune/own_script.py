"""The user's own training script: what a first look at it told. How it is looked at is `trainers/trl_own_script.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Rewards = Literal["real", "skip"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the user's files something is called."""

    file: str
    line: int
    span: tuple[int, int, int, int] | None = None
    """First line, last line, first column, column after the last, in bytes; None where the interpreter is older than 3.11."""

    maker: str | None = None
    """`TrlParser.parse_args_and_config` and the like, where a library made the call."""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The model that the script names, or gives ready-made."""

    name: str | None
    given: bool
    """True where the script loads it itself."""

    config: Mapping[str, Any] | None
    dtype: str | None
    attn_implementation: str | None
    load_in_4bit: bool
    load_in_8bit: bool


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the script gives its trainer."""

    method: str
    trainer: str
    """The class that it builds, which may be one of its own."""

    model: OwnModel
    settings: Mapping[str, Any]
    """Of its configuration, what differs from the class's defaults."""

    left: tuple[str, ...]
    """Of these, what is no plain value."""

    raw: Mapping[str, Any]
    """Every plain field, as given, by default, or as assigned later."""

    changed: tuple[str, ...]
    """Fields that it assigns after the configuration was made."""

    expanded: tuple[str, ...]
    """Names that come out of a `**mapping` in the call; `*` stands for names that nobody can tell."""

    adapter: Mapping[str, Any] | None
    optimizers: bool
    rewards: tuple[str, ...]
    callbacks: tuple[str, ...]
    special: tuple[str, ...]
    """Of `tools`, `rollout_func` and `environment_factory`, those it gives."""

    rows: int | None
    prompts: Mapping[str, int] | None
    """Per cent of the rows -> tokens that so many prompts do not exceed; None where they can't be told."""

    trainer_place: Place
    train_place: Place | None
    config_place: Place | None
    ended_by: str | None
    """What the script asks of its trainer before it trains; None where nothing."""

    modules: tuple[str, ...]
    """The script and the user's own files that it imports."""

    prompts_why: str | None = None


@dataclass(frozen=True, kw_only=True)
class OwnScript:
    """A script with its arguments, and what a look at it told."""

    path: str
    """As it was typed."""

    arguments: tuple[str, ...]
    rewards: Rewards
    """`real`, or `skip`: then no reward is called."""

    look: Look
    fingerprint: str
    """Of the script and of the user's own files that it imports."""

    @property
    def takes_flags(self) -> bool:
        """Whether its configuration comes from a parser that takes TRL's settings as flags."""
        place = self.look.config_place
        return place is not None and (place.maker or "").endswith((".parse_args_and_config", ".parse_args_into_dataclasses"))
