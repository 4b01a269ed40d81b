"""Terminal output of predictions: verdict, memory bars against the limit, speed, and ways to
fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Forecast, PredictedCandidate, WayToFit, setting_text
from autotune.core.candidate import Candidate
from autotune.core.job import Job
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import GIB, format_bytes
from autotune.report.answer_document import differing_knobs
from autotune.report.candidate_rows import FITS_IN_WORDS
from autotune.report.dataset_rows import data_lines
from autotune.report.line_wrapping import print_line
from autotune.search.advice import as_flags

if TYPE_CHECKING:
    from rich.console import Console

WIDEST_BAR = 56
LABEL = 14
FIGURE = 11

SURE, UNSURE, LIMIT = "█", "░", "│"
"""Bar characters: expected need, upper end of the interval, limit."""


def show_prediction(
    console: Console,
    job: Job,
    candidate: Candidate,
    prediction: Prediction,
    *,
    assumed: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print the verdict of one candidate, then its memory by phase and part."""
    workload = job.task.workload
    model = workload.model
    console.print(f"{workload.method} of {model.name} ({model.origin}) with {workload.framework}, on {job.task.hardware}")
    print_line(console, f"settings {_knobs(candidate.knobs)}")
    print_line(console, f"basis    predicted, nothing was measured; {_basis(prediction)}")
    for taken in dict.fromkeys((*assumed, *prediction.assumptions)):
        print_line(console, f"assumed  {taken}")
    for note in (*data_lines(job.data), *(f"note     {note}" for note in notes)):
        print_line(console, note)
    console.print()
    _show_figures(console, prediction)


def show_forecast(console: Console, job: Job, answer: Forecast, described: Mapping[str, Any], *, confirm_with: str) -> None:
    """Print the predicted recommendation, or the reason that there is none, and the command that
    measures it."""
    console.print("Predicted, nothing was measured.")
    if answer.winner is None:
        _show_no_winner(console, answer)
    else:
        _show_winner(console, answer, answer.winner)
    if answer.undecided is not None:
        rate = _rate(answer.undecided.prediction.tokens_per_second)
        console.print(f"Possibly better, fit undecided ({rate}): {_knobs(answer.undecided.candidate.knobs)}")
    files = (described["recommendation"] or {}).get("files") or []
    if files:
        console.print(f"Written: {', '.join(files)}")
    console.print(_coverage(answer))
    console.print(f"To confirm it, where the hardware is: {confirm_with}")


def _coverage(answer: Forecast) -> str:
    spent = f"in {answer.elapsed_seconds:.0f} s, {answer.screened:,} of them cannot fit. None was run."
    if not answer.ended_by_budget:
        return f"{answer.candidates:,} candidates predicted {spent}"
    return (
        f"--budget ended it: {answer.predicted:,} of {answer.candidates:,} candidates predicted {spent} "
        "This is the best of these; a longer --budget covers the others."
    )


def _show_winner(console: Console, answer: Forecast, winner: PredictedCandidate) -> None:
    if answer.relaxed:
        console.print("Nothing surely fits at the preferred settings. Relaxed, which changes what is learned:")
        console.print(f"  {_knobs(answer.relaxed)}")
    console.print(f"recommended  {_knobs(winner.candidate.knobs)}")
    if answer.baseline is not None:
        console.print(f"baseline     {_knobs(answer.baseline.candidate.knobs)}")
        console.print(f"             {_summary(answer.baseline.prediction)}")
    for change in answer.changes:
        learning = ", changes what is learned" if change.effect == "learning" else ""
        console.print(f"  {change.name}: {change.baseline} -> {change.recommended}{learning} ({change.why})")
    console.print()
    _show_figures(console, winner.prediction)
    for label, others in (("next best", answer.runner_ups), ("trade-off", answer.trade_offs)):
        for other in others:
            console.print(f"{label}    {_summary(other.prediction)}: {_knobs(differing_knobs(winner, other))}")


def _show_no_winner(console: Console, answer: Forecast) -> None:
    surely = answer.screened == answer.candidates
    console.print("Nothing fits." if surely else "Nothing surely fits; measure to decide about the undecided candidates.")
    if answer.nearest_miss is not None:
        console.print(f"Nearest miss: {_knobs(answer.nearest_miss.candidate.knobs)}")
        console.print()
        _show_verdict(console, answer.nearest_miss.prediction)
        _show_picture(console, answer.nearest_miss.prediction)
    show_ways_of_baseline(console, answer.ways_to_fit)


def _show_figures(console: Console, prediction: Prediction) -> None:
    _show_verdict(console, prediction)
    _show_picture(console, prediction)
    _show_speed(console, prediction)
    _show_engine(console, prediction)


def _show_verdict(console: Console, prediction: Prediction) -> None:
    margin, limit = prediction.margin_bytes, format_bytes(prediction.limit_bytes)
    peak = _span(prediction.peak_memory_bytes)
    if prediction.failure is not None:
        console.print(f"does not fit: it would stop with: {prediction.failure}")
    if prediction.fits:
        console.print(f"fits: {peak} of {limit}; {format_bytes(margin.value)} left, at least {format_bytes(margin.low)}")
    elif prediction.fits is False and prediction.failure is None:
        console.print(
            f"does not fit: {peak} of {limit}; {format_bytes(-margin.value)} too much, at least {format_bytes(-margin.high)}"
        )
    elif prediction.fits is None:
        console.print(f"can't be decided: {peak} of {limit}")
        for fact in prediction.depends_on:
            console.print(f"  depends on {fact}")
    shorter = prediction.peak_memory_bytes_at_lengths
    if shorter is not None:
        console.print(f"At the lengths given: {FITS_IN_WORDS[prediction.fits_at_lengths]}, {_span(shorter)}.")
    phase = prediction.peak_phase
    if phase is not None:
        counted = prediction.torch_peak_reserved_bytes
        beyond = (
            "it counts offloaded memory" if counted.value > prediction.peak_memory_bytes.value else "the rest is outside torch"
        )
        allocated = _span(prediction.torch_peak_allocated_bytes)
        console.print(
            f"The peak is in phase {phase.name}. torch itself: {allocated} allocated, {_span(counted)} reserved; {beyond}."
        )
    console.print()


def _show_picture(console: Console, prediction: Prediction) -> None:
    """Print phases and parts as bars on one scale, with the limit."""
    top = max(prediction.limit_bytes, *(phase.peak_bytes.high for phase in prediction.phases), prediction.peak_memory_bytes.high)
    label = max(LABEL, *(len(name) + 1 for name in prediction.breakdown)) if prediction.breakdown else LABEL
    width = max(10, min(WIDEST_BAR, console.width - label - FIGURE - 4))
    console.print(f"by phase, against the limit of {format_bytes(prediction.limit_bytes)}", soft_wrap=True)
    for phase in prediction.phases:
        console.print(_line(phase.name, phase.peak_bytes, top, width, prediction.limit_bytes, label), soft_wrap=True)
    peak = prediction.peak_phase
    console.print(f"by part, at the peak{f' ({peak.name})' if peak else ''}", soft_wrap=True)
    for name, size in sorted(prediction.breakdown.items(), key=lambda part: -part[1]):
        if size:
            console.print(
                _line(name.replace("_", " "), Estimate.exactly(size), top, width, prediction.limit_bytes, label), soft_wrap=True
            )
    console.print()


def _line(label: str, size: Estimate, top: float, width: int, limit: int, widest: int) -> str:
    def cells(count: float) -> int:
        return round(count / top * width)

    bar = list((SURE * cells(size.value)).ljust(cells(size.high), UNSURE).ljust(width + 1))
    bar[min(cells(limit), width)] = LIMIT
    return f"  {label:<{widest}}{''.join(bar)} {_gib(size.value):>{FIGURE}}"


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB"


def _show_speed(console: Console, prediction: Prediction) -> None:
    if prediction.tokens_per_second is None:
        console.print("speed    unknown for this hardware until a measurement on it")
        return
    longest = {phase.name: phase.seconds for phase in prediction.phases if phase.seconds is not None}
    longest_of = "completions" if "rollout" in longest else "rows"
    print_line(console, f"speed    {_rate(prediction.tokens_per_second)} at the longest {longest_of}; {_shares(longest)}")
    if prediction.tokens_per_second_at_lengths is not None:
        shares = _shares(prediction.seconds_at_lengths)
        print_line(console, f"         {_rate(prediction.tokens_per_second_at_lengths)} at the lengths given; {shares}")
    _show_pipeline(console, prediction)


def _show_pipeline(console: Console, prediction: Prediction) -> None:
    """Print both sides of a run whose engines have GPUs of their own."""
    times = prediction.pipeline
    if times is None:
        return
    sides = " and ".join(
        f"{name} {one.value:,.1f} s ({one.low:,.1f} to {one.high:,.1f})"
        for name, one in (("generation", times.generation), ("training", times.training))
    )
    rollout = next((phase.seconds.value for phase in prediction.phases if phase.name == "rollout" and phase.seconds), 0.0)
    waits = f"training waits {rollout:,.1f} s for completions" if rollout >= 0.1 else "the engines wait for training"
    print_line(console, f"pipeline {sides} per batch, on GPUs of their own; {waits}")


def _shares(seconds: Mapping[Phase, Estimate]) -> str:
    total = sum(spent.value for spent in seconds.values())
    return ", ".join(
        f"{name} {spent.value / total:.0%}" for name, spent in seconds.items() if total and spent.value / total >= 0.005
    )


def _show_engine(console: Console, prediction: Prediction) -> None:
    engine = prediction.engine
    if engine is not None:
        print_line(
            console,
            f"engine   KV cache {_span(engine.kv_cache_bytes)}: {engine.kv_cache_tokens:,} tokens,"
            f" {engine.concurrency:.1f} sequences of the longest length at a time",
        )


def show_ways(console: Console, ways: Sequence[WayToFit]) -> None:
    """Print the changes that make the candidate of `predict` fit."""
    if not ways:
        console.print("No change of one or two settings makes it surely fit.")
        return
    console.print("Changes that make it fit, the cheapest first:")
    _list_ways(console, ways, flag="--set")


def show_ways_of_baseline(console: Console, ways: Sequence[WayToFit]) -> None:
    """Print the changes that make the baseline of `run` fit, where nothing that was searched does."""
    if ways:
        console.print("Predicted changes that make the baseline fit, the cheapest first:")
        _list_ways(console, ways, flag="--hold")


def _list_ways(console: Console, ways: Sequence[WayToFit], flag: str) -> None:
    for way in ways:
        console.print(f"  {as_flags(way.change, flag)}")
        console.print(f"      {', '.join(_consequences(way))}")


def _consequences(way: WayToFit) -> Iterator[str]:
    margin = way.prediction.margin_bytes
    yield f"leaves {format_bytes(margin.value)} free, at least {format_bytes(margin.low)}"
    if way.speed_ratio is not None:
        yield f"{way.speed_ratio:.2f} times the speed"
    if way.learning:
        yield "changes what is learned"


def _summary(prediction: Prediction) -> str:
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[prediction.fits]
    why = f" (it would stop with: {prediction.failure})" if prediction.failure else ""
    return f"{verdict}, {_span(prediction.peak_memory_bytes)}, {_rate(prediction.ranking_rate)}{why}"


def _basis(prediction: Prediction) -> str:
    versions = " ".join(
        f"{name} {prediction.versions[name]}" for name in ("trl", "transformers", "peft", "torch") if name in prediction.versions
    )
    if prediction.basis == "generic":
        return f"a plain Hugging Face step replaces the framework's own ({versions})"
    return f"traced from the training step of {versions}"


def _span(estimate: Estimate) -> str:
    if estimate.low == estimate.high:
        return format_bytes(estimate.value)
    return f"{format_bytes(estimate.value)} ({format_bytes(estimate.low)} to {format_bytes(estimate.high)})"


def _rate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "speed not known"
    return f"{estimate.value:,.0f} tokens/s ({estimate.low:,.0f} to {estimate.high:,.0f})"


def _knobs(knobs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={setting_text(value)}" for name, value in knobs.items() if value is not None)
