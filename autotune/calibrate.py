"""Predictions corrected by a measurement: what one probe showed holds for its neighbours on the same load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from autotune.measurement import Measurement, Outcome, Phase
from autotune.predict.predictor import Calibration
from autotune.prediction import Prediction


class Calibrations:
    """By load: what stays the same while batch, lengths and checkpointing move."""

    def __init__(self) -> None:
        self._outside: dict[str, list[int]] = {}
        self._scales: dict[str, list[Mapping[Phase, float]]] = {}

    def learn(self, load_key: str, predicted: Prediction, measured: Measurement) -> None:
        """From one probe that ended well. Several of one load: the median of each figure."""
        if measured.outcome is not Outcome.OK:
            return
        memory = measured.memory
        if memory.peak_bytes is not None and memory.torch_reserved_bytes is not None:
            self._outside.setdefault(load_key, []).append(max(0, memory.peak_bytes - memory.torch_reserved_bytes))
        scale = _scale(predicted, measured)
        if scale:
            self._scales.setdefault(load_key, []).append(scale)

    def of(self, load_key: str) -> Calibration | None:
        """None where nothing of this load was measured."""
        outside, scales = self._outside.get(load_key), self._scales.get(load_key)
        if not outside and not scales:
            return None
        return Calibration(
            outside_torch_bytes=round(statistics.median(outside)) if outside else None,
            seconds_scale=_median(scales) if scales else None,
        )


def _scale(predicted: Prediction, measured: Measurement) -> dict[Phase, float]:
    """Measured over predicted seconds of one cycle, by phase; the measurement's are of all timed cycles together."""
    speed = measured.worst
    if speed is None or not speed.cycle_seconds:
        return {}
    cycles = len(speed.cycle_seconds)
    seconds = {phase.name: phase.seconds.value for phase in predicted.phases if phase.seconds is not None}
    return {
        phase: speed.phase_seconds[phase] / cycles / expected
        for phase, expected in seconds.items()
        if expected > 0 and speed.phase_seconds.get(phase, 0) > 0
    }


def _median(scales: list[Mapping[Phase, float]]) -> dict[Phase, float]:
    names = {phase for scale in scales for phase in scale}
    return {phase: statistics.median(scale[phase] for scale in scales if phase in scale) for phase in names}
