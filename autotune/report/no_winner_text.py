"""Terminal output of a measured answer without a recommendation: why, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.core.answer import Recommendation, Trial
from autotune.core.job import Job
from autotune.core.measurement import Outcome
from autotune.core.space import Candidate, setting_text
from autotune.core.units import counted
from autotune.report.answer_facts import failed_without_memory, has_no_results, nearest_miss
from autotune.report.answer_tables import peak_text, show_table
from autotune.report.job_text import assignments, limit_text, searched_knobs, shorten
from autotune.report.prediction_text import show_ways_of_baseline

if TYPE_CHECKING:
    from rich.console import Console


MAX_TABLE_ROWS = 12

MAX_CELL_CHARACTERS = 160


def show_nothing_fits(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    """Print why nothing is recommended, what was tried, and what to do next."""
    if failed_without_memory(answer):
        console.print(_failure_text(answer))
    elif has_no_results(answer):
        console.print(f"Nothing was found out: {_why_no_results(answer)}.")
    else:
        _show_misses(console, job, answer)
    _show_trials(console, job, answer)
    show_ways_of_baseline(console, answer.ways_to_fit)
    console.print(_what_next(job, answer))


def _failure_text(answer: Recommendation) -> str:
    has_fitted = any(trial.verdict.fits for trial in answer.trials)
    if not has_fitted:
        why = "Every probe failed, and none for lack of memory"
        return f"{why}: whether any candidate fits is unknown."
    if any(trial.purpose == "confirm" for trial in answer.trials):
        return "What fitted failed in the longer run that confirms it, and not for lack of memory."
    return "What fitted was not confirmed by a longer run, so nothing is recommended."


def _show_misses(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    # 1. What is proven.
    crashed = sum(trial.measurement.outcome is Outcome.CRASH for trial in answer.trials)
    has_gaps = crashed > 0 or answer.proven == "not all measured"
    partly = " that ran to its end" if has_gaps else ""
    console.print(f"Nothing{partly} fits into {limit_text(job)}.")
    if crashed:
        console.print(
            f"{counted(crashed, 'probe')} crashed, which says nothing about memory: see the"
            " reasons below."
        )

    # 2. How close it came.
    miss = nearest_miss(answer)
    if miss is not None:
        console.print(f"Nearest miss: {_short(miss.candidate, job)}")
        console.print(f"  peak {peak_text(miss)}; {miss.verdict.why}")

    # 3. The searched learning knobs in their relaxation order, with the measured values.
    for name in job.space.relax:
        if name not in job.space:
            continue
        measured = [trial.candidate.knobs.get(name) for trial in answer.trials]
        tried = [setting_text(value) for value in job.space[name].choices if value in measured]
        if len(tried) > 1:
            console.print(f"Given up without success: {name} (tried {', '.join(tried)})")


def _show_trials(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    if answer.trials:
        rows = []
        for trial in answer.trials[:MAX_TABLE_ROWS]:
            rows.append(_trial_cells(job, trial))
        show_table(console, (job.task.hardware.basis, "outcome", "peak memory", "why"), rows)
    if len(answer.trials) > MAX_TABLE_ROWS:
        console.print(
            f"... and {len(answer.trials) - MAX_TABLE_ROWS} more, in recommendation.json's study."
        )


def _trial_cells(job: Job, trial: Trial) -> tuple[str, str, str, str]:
    why = trial.verdict.why
    if trial.measurement.failure is not None:
        why = trial.measurement.failure.evidence
    return (
        _short(trial.candidate, job),
        str(trial.measurement.outcome),
        peak_text(trial),
        shorten(why, MAX_CELL_CHARACTERS),
    )


def _why_no_results(answer: Recommendation) -> str:
    if answer.proven == "not all measured":
        return "every probe was ended from outside, by another process or by the system"
    ended = f"it was {answer.proven}" if answer.interrupted else "the budget was spent"
    return f"{ended} before the first probe had an answer"


def _short(candidate: Candidate, job: Job) -> str:
    """Return the candidate's searched knobs."""
    moving = {}
    for knob in searched_knobs(job):
        if knob.name in candidate.knobs:
            moving[knob.name] = candidate.knobs[knob.name]
    return assignments(moving) or "the only candidate"


def _what_next(job: Job, answer: Recommendation) -> str:
    if failed_without_memory(answer):
        return (
            "Next: see the reason above. `--hold` another value of the failing setting, or fix it;"
            " then --resume or --fresh."
        )
    if answer.interrupted:
        return f"Next: the search was {answer.proven}. Go on with --resume."
    if answer.proven == "not all measured":
        return "Next: find out what ends the probes, then measure again with --fresh."
    counts = answer.counts
    decided = counts.probed + counts.screened + counts.implied >= counts.candidates
    if answer.proven != "nothing fits" and not decided:
        return (
            "Next: the space was not searched to its end. Go on with --resume and a larger"
            " --budget."
        )
    name = next(iter(job.space.relax), None)
    smaller = "give --search smaller values"
    if name:
        smaller = f"let {name} go lower (--search {name}=...)"
    return f"Next: {smaller}, raise --memory-limit, or request more or larger devices with --gpus."
