"""What the dashboard's notes say, in Markdown made from the records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial
from optuna_dashboard._note import note_ver_key, split_body

from autotune.recommendation import Trial
from autotune.study import records, screened
from autotune.units import GIB, format_bytes, format_seconds

SHOWN_LINES = 12
SHOWN_COLUMNS = 80


def as_attributes(body: str, trial_id: int | None) -> dict[str, Any]:
    """A note where the dashboard looks for it. Version 0, so that one written by hand counts as newer."""
    return {note_ver_key(trial_id): 0, **split_body(body, trial_id)} if body else {}


def of_trial(frozen: FrozenTrial) -> str:
    """How the candidate ended and why."""
    told = records.read_trial(frozen)
    if told is not None:
        return "\n\n".join(_told(told))
    why, predicted = str(frozen.user_attrs.get(records.WHY, "")), frozen.user_attrs.get(screened.PREDICTED)
    if predicted:
        return f"**screened**: {why}. Nothing was measured; predicted figures:\n\n{fenced(json.dumps(predicted, indent=1))}"
    return why


def _told(trial: Trial) -> list[str]:
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
        parts.append(f"cause: {measured.failure.cause or 'not known'}; phase: {measured.failure.phase or 'not known'}")
        parts.append(fenced(_end_of(measured.failure.excerpt or measured.failure.evidence)))
    return parts


def _end_of(text: str) -> str:
    """The last lines, none wider than the note; failure.log has all of it."""
    lines = text.strip().splitlines()
    return "\n".join(_short(line) for line in lines[-SHOWN_LINES:])


def _short(value: Any) -> Any:
    """Whatever it is; a text no wider than the page, which wraps neither a block of text nor an attribute."""
    return f"{value[: SHOWN_COLUMNS - 4]} ..." if isinstance(value, str) and len(value) > SHOWN_COLUMNS else value


def fenced(text: str) -> str:
    """A block that the text itself cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def facts_of(frozen: FrozenTrial) -> dict[str, Any]:
    """Columns that the dashboard can sort by; the records themselves are nested too deep to be read there."""
    told = records.read_trial(frozen)
    plain = {key: _short(value) for key, value in frozen.user_attrs.items() if isinstance(value, str | int | float | bool)}
    if told is None:
        return plain
    measured, speed = told.measurement, told.measurement.ranking_speed
    peak = measured.memory.peak_bytes
    return {
        **plain,
        "fits": told.verdict.fits,
        **({"tokens per second": round(speed.tokens_per_second, 1)} if speed else {}),
        **({"peak GiB": round(peak / GIB, 3)} if peak is not None else {}),
        "seconds": round(measured.cost.total_seconds, 1),
        **({"cause": measured.failure.cause or "not known"} if measured.failure else {}),
    }


def settings_of(frozen: FrozenTrial) -> Mapping[str, Any] | None:
    """What the framework was told."""
    candidate = frozen.user_attrs.get(records.CANDIDATE)
    return candidate.get("settings") if isinstance(candidate, dict) else None
