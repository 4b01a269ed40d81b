"""Answers of the Python API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.core.answer import Forecast, Recommendation, WayToFit
    from autotune.core.job import Job
    from autotune.core.prediction import Prediction
    from autotune.core.space import Candidate


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class RunAnswer:
    """Answer of `run`: a recommendation from measurements, or a forecast from predictions."""

    job: Job  # the answered job; its limits are wider than requested where settings were relaxed
    recommendation: Recommendation | None  # None: nothing could be measured here
    forecast: Forecast | None  # None: measured
    document: Mapping[str, Any]  # content of `run --json` and recommendation.json

    def __repr__(self) -> str:
        from autotune.report.document_types import read_answer
        from autotune.report.html.render import headline

        return f"<RunAnswer: {headline(read_answer(self.document))}>"

    @property
    def winner(self) -> Candidate | None:
        """Recommended configuration; None if nothing fits or the prediction is undecided."""
        answer = self.recommendation or self.forecast
        if answer is None or answer.winner is None:
            return None
        return answer.winner.candidate

    @property
    def files(self) -> tuple[Path, ...]:
        """Winner in the framework's own files, ready to train with."""
        recommended = self.document["recommendation"]
        return tuple(Path(file) for file in recommended["files"]) if recommended else ()


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class PredictAnswer:
    """Answer of `predict`."""

    job: Job
    candidate: Candidate
    prediction: Prediction
    ways: tuple[WayToFit, ...]  # changes that make it fit, cheapest first; empty if it fits
    write_document: Callable[[], Mapping[str, Any]] = field(compare=False)

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """Content of `predict --json`, written when it is first asked for."""
        return self.write_document()

    def __repr__(self) -> str:
        from autotune.report.verdict_text import verdict_text

        return f"<PredictAnswer: {verdict_text(self.prediction)}>"
