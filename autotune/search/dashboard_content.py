"""Content of the dashboard, derived from a study's records: notes, columns and artifacts.

The records are nested too deeply for optuna-dashboard. A trial gets a note with its outcome, flat
columns for sorting, and its settings, output, failure and memory over time as files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from optuna.trial import FrozenTrial, TrialState

from autotune.core.answer import Trial
from autotune.core.measurement import Failure, Memory
from autotune.core.plain_data import plain
from autotune.core.units import GIB, format_bytes, format_seconds
from autotune.search.trial_storage import CANDIDATE, PREDICTED, WHY, read_trial

READ_ONLY = "The dashboard is read-only."
# Size of a quoted log, since the page wraps no line; failure.log has all of it
MAX_LINES = 12
MAX_COLUMNS = 80
ELLIPSIS = " ..."
MIN_FENCE = 3  # Backticks of Markdown's fence


def best_that_fits(trials: Sequence[FrozenTrial], recommended: int | None) -> FrozenTrial | None:
    """Return the recommended trial, or the fastest whose constraints hold."""
    fitting = []
    for trial in trials:
        violated = any(amount > 0 for amount in trial.constraints.values())
        if trial.state is not TrialState.COMPLETE or violated:
            continue
        if trial.number == recommended:
            return trial
        fitting.append(trial)

    def value(trial: FrozenTrial) -> float:
        return trial.value or float("-inf")

    return max(fitting, key=value, default=None)


# 1. Notes, in Markdown.


def note_while_searching(trials: Sequence[FrozenTrial]) -> str:
    """Return the note of a study without a recommendation."""
    finished = sum(trial.state.is_finished() for trial in trials)
    best = best_that_fits(trials, None)
    fastest = "nothing has fitted so far"
    if best is not None:
        fastest = f"the fastest that fits so far is trial {best.number}"
    return f"{finished} trials on record; {fastest}. There is no recommendation yet."


def note_of(frozen: FrozenTrial) -> str:
    """Return the candidate's outcome and its reason."""
    trial = read_trial(frozen)
    if trial is not None:
        return "\n\n".join(_paragraphs(trial))
    why = str(frozen.user_attrs.get(WHY, ""))
    predicted = frozen.user_attrs.get(PREDICTED)
    if not predicted:
        return why
    predicted_json = json.dumps(predicted, indent=1)
    figures = _fenced(predicted_json)
    return f"**screened**: {why}. Nothing was measured; predicted figures:\n\n{figures}"


def _paragraphs(trial: Trial) -> list[str]:
    measurement = trial.measurement
    speed = measurement.ranking_speed
    memory = measurement.memory
    cost = measurement.cost
    paragraphs = [f"**{measurement.outcome}** ({trial.purpose}): {trial.verdict.why}"]
    if speed is not None:
        end = ", stopped early: slower than the best" if speed.cut_short else ""
        paragraphs.append(
            f"{speed.tokens_per_second:,.0f} tokens/s at completions of {speed.completion_tokens}"
            f" tokens{end}"
        )
    if memory.peak_bytes is not None:
        paragraphs.append(
            f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.limit_bytes)}, limited"
            f" by {memory.bound_by}"
        )
    paragraphs.append(
        f"took {format_seconds(cost.total_seconds)}, of that loading"
        f" {format_seconds(cost.load_seconds)}"
    )
    if measurement.failure is not None:
        paragraphs += _paragraphs_of_failure(measurement.failure)
    return paragraphs


def _paragraphs_of_failure(failure: Failure) -> list[str]:
    cause = f"cause: {failure.cause or 'unknown'}; phase: {failure.phase or 'unknown'}"
    reported = failure.excerpt or failure.evidence
    lines = reported.strip().splitlines()
    last_lines = [_shortened(line) for line in lines[-MAX_LINES:]]
    excerpt = "\n".join(last_lines)
    return [cause, _fenced(excerpt)]


def _shortened(text: str) -> str:
    if len(text) <= MAX_COLUMNS:
        return text
    shown = MAX_COLUMNS - len(ELLIPSIS)
    return text[:shown] + ELLIPSIS


def _fenced(text: str) -> str:
    """Return a fenced block with a fence that does not occur in the text."""
    runs = re.findall(r"`+", text)
    longest = max(map(len, runs), default=0)
    fence = "`" * max(MIN_FENCE, longest + 1)
    return f"{fence}\n{text}\n{fence}"


# 2. Columns.


def columns_of(frozen: FrozenTrial) -> dict[str, Any]:
    """Return flat columns for sorting."""
    columns: dict[str, Any] = {}
    for key, value in frozen.user_attrs.items():
        if isinstance(value, str):
            columns[key] = _shortened(value)
        elif isinstance(value, int | float | bool):
            columns[key] = value
    trial = read_trial(frozen)
    if trial is None:
        return columns
    measurement = trial.measurement
    speed = trial.measurement.ranking_speed
    peak_bytes = measurement.memory.peak_bytes
    failure = measurement.failure
    columns["fits"] = trial.verdict.fits
    if speed is not None:
        columns["tokens per second"] = round(speed.tokens_per_second, 1)
    if peak_bytes is not None:
        columns["peak GiB"] = round(peak_bytes / GIB, 3)
    columns["seconds"] = round(measurement.cost.total_seconds, 1)
    if failure is not None:
        columns["cause"] = failure.cause or "unknown"
    return columns


# 3. Artifacts.


def files_of(frozen: FrozenTrial) -> Mapping[str, tuple[str, str]]:
    """Return MIME type and content by file name."""
    files: dict[str, tuple[str, str]] = {}
    candidate = frozen.user_attrs.get(CANDIDATE)
    settings = candidate.get("settings") if isinstance(candidate, dict) else None
    if settings:
        settings_yaml = yaml.safe_dump(dict(settings), sort_keys=False)
        files["settings.yaml"] = "text/plain", settings_yaml
    trial = read_trial(frozen)
    if trial is None:
        return files
    memory = trial.measurement.memory
    failure = trial.measurement.failure
    if trial.measurement.printed:
        files["output.log"] = "text/plain", trial.measurement.printed
    if failure is not None:
        reported = failure.excerpt or failure.evidence
        files["failure.log"] = "text/plain", reported
    memory_json = json.dumps(plain(memory), indent=1)
    files["memory.json"] = "application/json", memory_json
    if memory.timeline:
        files["memory.csv"] = "text/csv", _timeline_table(memory)
    return files


def _timeline_table(memory: Memory) -> str:
    lines = ["seconds,peak_bytes,phase"]
    for moment in memory.timeline:
        lines.append(f"{moment.seconds},{moment.peak_bytes},{moment.phase or ''}")
    return "\n".join(lines) + "\n"
