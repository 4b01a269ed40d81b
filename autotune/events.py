"""What a listener hears while a question is being answered. Displays and callbacks consume these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autotune.candidate import Candidate
from autotune.recommendation import Purpose, Trial


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The question is settled; the search begins."""

    candidates: int
    budget_seconds: float
    max_probes: int
    resumed_trials: int


@dataclass(frozen=True, kw_only=True)
class ProbeStarted:
    number: int
    purpose: Purpose
    candidate: Candidate
    loads: bool
    """Whether this probe has to load a model or engine first."""

    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class ProbeEnded:
    trial: Trial
    best: Trial | None
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class Note:
    """One sentence for the reader."""

    text: str


Event: TypeAlias = Settled | ProbeStarted | ProbeEnded | Note
Listener: TypeAlias = Callable[[Event], None]
