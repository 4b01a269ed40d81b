"""Notes of the dashboard, as Markdown derived from the records."""

from __future__ import annotations

import json
import re
from typing import Any

from optuna.trial import FrozenTrial
from optuna_dashboard._note import note_ver_key, split_body

from autotune.core.answer import Trial
from autotune.core.units import GIB, format_bytes, format_seconds
from autotune.search import trial_records

MAX_LINES = 12
MAX_COLUMNS = 80


def as_attributes(body: str, trial_id: int | None) -> dict[str, Any]:
    """Return a note as attributes of the dashboard. Version 0, so that one written by hand is newer."""
    return {note_ver_key(trial_id): 0, **split_body(body, trial_id)} if body else {}


def of_trial(frozen: FrozenTrial) -> str:
    """Return the candidate's outcome and its reason."""
    trial = trial_records.read_trial(frozen)
    if trial is not None:
        return "\n\n".join(_paragraphs(trial))
    why, predicted = str(frozen.user_attrs.get(trial_records.WHY, "")), frozen.user_attrs.get(trial_records.PREDICTED)
    if predicted:
        return f"**screened**: {why}. Nothing was measured; predicted figures:\n\n{fenced(json.dumps(predicted, indent=1))}"
    return why


def _paragraphs(trial: Trial) -> list[str]:
    measured, speed = trial.measurement, trial.measurement.ranking_speed
    memory, cost = measured.memory, measured.cost
    parts = [f"**{measured.outcome}** ({trial.purpose}): {trial.verdict.why}"]
    if speed is not None:
        parts.append(f"{speed.tokens_per_second:,.0f} tokens/s at completions of {speed.completion_tokens} tokens")
    if memory.peak_bytes is not None:
        parts.append(
            f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.limit_bytes)}, limited by {memory.bound_by}"
        )
    parts.append(f"took {format_seconds(cost.total_seconds)}, of that loading {format_seconds(cost.load_seconds)}")
    if measured.failure is not None:
        parts.append(f"cause: {measured.failure.cause or 'unknown'}; phase: {measured.failure.phase or 'unknown'}")
        lines = (measured.failure.excerpt or measured.failure.evidence).strip().splitlines()
        parts.append(fenced("\n".join(_short(line) for line in lines[-MAX_LINES:])))  # failure.log has all of them
    return parts


def _short(value: Any) -> Any:
    """Return the value; a text is cut to the page's width, since the page wraps no attribute."""
    return f"{value[: MAX_COLUMNS - 4]} ..." if isinstance(value, str) and len(value) > MAX_COLUMNS else value


def fenced(text: str) -> str:
    """Return a fenced block with a fence that does not occur in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def facts_of(frozen: FrozenTrial) -> dict[str, Any]:
    """Return flat columns for sorting; the records are nested too deeply for the dashboard."""
    trial = trial_records.read_trial(frozen)
    plain = {key: _short(value) for key, value in frozen.user_attrs.items() if isinstance(value, str | int | float | bool)}
    if trial is None:
        return plain
    measured, speed = trial.measurement, trial.measurement.ranking_speed
    peak = measured.memory.peak_bytes
    return {
        **plain,
        "fits": trial.verdict.fits,
        **({"tokens per second": round(speed.tokens_per_second, 1)} if speed else {}),
        **({"peak GiB": round(peak / GIB, 3)} if peak is not None else {}),
        "seconds": round(measured.cost.total_seconds, 1),
        **({"cause": measured.failure.cause or "unknown"} if measured.failure else {}),
    }
