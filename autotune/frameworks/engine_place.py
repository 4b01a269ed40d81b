"""Place of a training's engine where no setting of today's release says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlaceOfEngine:
    """GPUs of vLLM by settings of former releases."""

    mode: str
    server_gpus: int  # GPUs of its own; 0: it shares those that train
    sentence: str
