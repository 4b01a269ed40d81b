"""Terminal output of a measured answer without a recommendation: why, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.core.answer import Recommendation
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
    if failed_without_memory(answer):
        fitted = any(trial.verdict.fits for trial in answer.trials)
        if fitted and any(trial.purpose == "confirm" for trial in answer.trials):
            console.print(
                "What fitted failed in the longer run that confirms it, and not for lack of memory."
            )
        elif fitted:
            console.print(
                "What fitted was not confirmed by a longer run, so nothing is recommended."
            )
        else:
            console.print(
                "Every probe failed, and none for lack of memory: whether any candidate fits is"
                " unknown."
            )
    elif has_no_results(answer):
        console.print(f"Nothing was found out: {_why_no_results(answer)}.")
    else:
        crashed = sum(trial.measurement.outcome is Outcome.CRASH for trial in answer.trials)
        partly = ""
        if crashed or answer.proven == "not all measured":
            partly = " that ran to its end"
        console.print(f"Nothing{partly} fits into {limit_text(job)}.")
        if crashed:
            console.print(
                f"{counted(crashed, 'probe')} crashed, which says nothing about memory: see the"
                " reasons below."
            )
        miss = nearest_miss(answer)
        if miss is not None:
            console.print(f"Nearest miss: {_short(miss.candidate, job)}")
            console.print(f"  peak {peak_text(miss)}; {miss.verdict.why}")
        # The searched learning knobs in their relaxation order, with the measured values.
        for name in job.space.relax:
            if name not in job.space:
                continue
            measured = [trial.candidate.knobs.get(name) for trial in answer.trials]
            tried = [setting_text(value) for value in job.space[name].choices if value in measured]
            if len(tried) > 1:
                console.print(f"Given up without success: {name} (tried {', '.join(tried)})")
    if answer.trials:
        rows = []
        for trial in answer.trials[:MAX_TABLE_ROWS]:
            why = trial.verdict.why
            if trial.measurement.failure is not None:
                why = trial.measurement.failure.evidence
            candidate = _short(trial.candidate, job)
            outcome = str(trial.measurement.outcome)
            rows.append((candidate, outcome, peak_text(trial), shorten(why, MAX_CELL_CHARACTERS)))
        show_table(console, (job.task.hardware.basis, "outcome", "peak memory", "why"), rows)
    if len(answer.trials) > MAX_TABLE_ROWS:
        console.print(
            f"... and {len(answer.trials) - MAX_TABLE_ROWS} more, in recommendation.json's study."
        )
    show_ways_of_baseline(console, answer.ways_to_fit)
    console.print(_what_next(job, answer))


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
