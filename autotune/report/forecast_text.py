"""Terminal output of `run` where nothing can be measured: the predicted recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Forecast, PredictedCandidate
from autotune.core.units import counted
from autotune.report.answer_facts import differing_knobs
from autotune.report.job_text import print_line
from autotune.report.memory_bars import show_memory
from autotune.report.prediction_text import (
    knobs_text,
    show_evidence,
    show_verdict,
    show_ways_of_baseline,
)
from autotune.report.verdict_text import rate_text, verdict_text

if TYPE_CHECKING:
    from rich.console import Console


def show_forecast(
    console: Console,
    answer: Forecast,
    described: Mapping[str, Any],
    *,
    confirm_with: str,
) -> None:
    """Print the predicted recommendation, or the reason that there is none, and the command that
    measures it.
    """
    console.print("Predicted, nothing was measured.")
    if answer.winner is not None:
        _show_winner(console, answer, answer.winner)
    else:
        _show_nothing_fits(console, answer)
    if answer.undecided is not None:
        rate = rate_text(answer.undecided.prediction.ranking_rate)
        knobs = knobs_text(answer.undecided.candidate.knobs)
        print_line(console, f"Possibly better, fit undecided ({rate}): {knobs}")
    files = (described["recommendation"] or {}).get("files") or []
    if files:
        console.print(f"Written: {', '.join(files)}")
    console.print(_summary(answer))
    console.print(f"To confirm it, where the hardware is: {confirm_with}")


def _show_winner(
    console: Console,
    answer: Forecast,
    winner: PredictedCandidate,
) -> None:
    # 1. The recommendation and what it changes.
    if answer.relaxed:
        console.print(
            "Nothing surely fits at the preferred settings. Relaxed, which changes what is learned:"
        )
        console.print(f"  {knobs_text(answer.relaxed)}")
    print_line(console, f"recommended  {knobs_text(winner.candidate.knobs)}")
    show_verdict(console, winner.prediction)
    if answer.baseline is not None:
        print_line(console, f"baseline     {knobs_text(answer.baseline.candidate.knobs)}")
        print_line(console, f"             {verdict_text(answer.baseline.prediction)}")
    for change in answer.changes:
        learning = ", changes what is learned" if change.effect == "learning" else ""
        values = f"{change.baseline} -> {change.recommended}"
        console.print(f"  {change.name}: {values}{learning} ({change.why})")
    console.print()

    # 2. Its evidence, and the alternatives.
    show_evidence(console, winner.prediction)
    for label, candidates in (("next best", answer.runner_ups), ("trade-off", answer.trade_offs)):
        for candidate in candidates:
            knobs = knobs_text(differing_knobs(winner, candidate))
            print_line(console, f"{label}    {knobs}: {verdict_text(candidate.prediction)}")


def _show_nothing_fits(console: Console, answer: Forecast) -> None:
    verdict = "Nothing surely fits; measure to decide about the undecided candidates."
    if answer.screened == answer.candidates:
        verdict = "Nothing fits."
    console.print(verdict)
    if answer.nearest_miss is not None:
        print_line(console, f"Nearest miss: {knobs_text(answer.nearest_miss.candidate.knobs)}")
        show_verdict(console, answer.nearest_miss.prediction)
    show_ways_of_baseline(console, answer.ways_to_fit)
    if answer.nearest_miss is not None:
        console.print()
        show_memory(console, answer.nearest_miss.prediction)


def _summary(answer: Forecast) -> str:
    """Return how much was predicted, and why no more."""
    count = counted(answer.candidates, "candidate")
    spent = f"in {answer.elapsed_seconds:.0f} s, {answer.screened:,} of them cannot fit."
    if not answer.ended_by_budget:
        return f"{count} predicted {spent} None was run."
    return (
        f"--budget ended it: {answer.predicted:,} of {count} predicted {spent} None was run."
        " This is the best of these; a longer --budget covers the others."
    )
