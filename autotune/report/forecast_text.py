"""Terminal output of predictions: verdict, memory bars against the limit, speed, ways to fit,
and emulated figures beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune import frameworks
from autotune.core.answer import Forecast, PredictedCandidate, WayToFit
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Phase
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate, KnobValue, setting_text
from autotune.core.units import GIB, format_bytes
from autotune.report.answer_document import differing_knobs
from autotune.report.document_rows import FITS_IN_WORDS
from autotune.report.job_text import describe_job, print_line, show_notes
from autotune.search.advice import as_flags

if TYPE_CHECKING:
    from rich.console import Console


WIDEST_BAR = 56
LABEL = 14
FIGURE = 11

# Bar characters: expected need, upper end of the interval, limit.
SURE = "█"
UNSURE = "░"
LIMIT = "│"


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
    packages = ("trl", "transformers", "peft", "torch")
    versions = " ".join(
        f"{name} {prediction.versions[name]}" for name in packages if name in prediction.versions
    )
    basis = f"traced from the training step of {versions}"
    if prediction.basis == "generic":
        basis = f"a plain Hugging Face step replaces the framework's own ({versions})"
    console.print(describe_job(job))
    print_line(console, f"settings {_knobs(_deciding(job, candidate))}")
    print_line(console, f"basis    predicted, nothing was measured; {basis}")
    for assumption in dict.fromkeys((*assumed, *prediction.assumptions)):
        print_line(console, f"assumed  {assumption}")
    show_notes(console, job, notes)
    console.print()
    _show_figures(console, prediction)


def _deciding(job: Job, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the knobs, and what else decides the memory of this framework."""
    workload = job.task.workload
    trainer = frameworks.trainer(workload.framework, workload.method)
    deciding = dict(candidate.knobs)
    for name in trainer.decides_memory:
        deciding.setdefault(name, candidate.settings.get(name))
    return deciding


def show_forecast(
    console: Console,
    job: Job,
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
        verdict = "Nothing surely fits; measure to decide about the undecided candidates."
        if answer.screened == answer.candidates:
            verdict = "Nothing fits."
        console.print(verdict)
        if answer.nearest_miss is not None:
            console.print(f"Nearest miss: {_knobs(answer.nearest_miss.candidate.knobs)}")
            console.print()
            _show_verdict(console, answer.nearest_miss.prediction)
            _show_picture(console, answer.nearest_miss.prediction)
        show_ways_of_baseline(console, answer.ways_to_fit)
    if answer.undecided is not None:
        rate = _rate(answer.undecided.prediction.tokens_per_second)
        console.print(
            f"Possibly better, fit undecided ({rate}): {_knobs(answer.undecided.candidate.knobs)}"
        )
    files = (described["recommendation"] or {}).get("files") or []
    if files:
        console.print(f"Written: {', '.join(files)}")
    spent = (
        f"candidates predicted in {answer.elapsed_seconds:.0f} s, {answer.screened:,} of them"
        " cannot fit. None was run."
    )
    summary = f"{answer.candidates:,} {spent}"
    if answer.ended_by_budget:
        summary = (
            f"--budget ended it: {answer.predicted:,} of {answer.candidates:,} {spent} "
            "This is the best of these; a longer --budget covers the others."
        )
    console.print(summary)
    console.print(f"To confirm it, where the hardware is: {confirm_with}")


def _show_winner(
    console: Console,
    answer: Forecast,
    winner: PredictedCandidate,
) -> None:
    if answer.relaxed:
        console.print(
            "Nothing surely fits at the preferred settings. Relaxed, which changes what is learned:"
        )
        console.print(f"  {_knobs(answer.relaxed)}")
    console.print(f"recommended  {_knobs(winner.candidate.knobs)}")
    if answer.baseline is not None:
        console.print(f"baseline     {_knobs(answer.baseline.candidate.knobs)}")
        console.print(f"             {_summary(answer.baseline.prediction)}")
    for change in answer.changes:
        learning = ", changes what is learned" if change.effect == "learning" else ""
        console.print(
            f"  {change.name}: {change.baseline} -> {change.recommended}{learning} ({change.why})"
        )
    console.print()
    _show_figures(console, winner.prediction)
    for label, candidates in (("next best", answer.runner_ups), ("trade-off", answer.trade_offs)):
        for candidate in candidates:
            knobs = _knobs(differing_knobs(winner, candidate))
            console.print(f"{label}    {_summary(candidate.prediction)}: {knobs}")


def _show_figures(console: Console, prediction: Prediction) -> None:
    _show_verdict(console, prediction)
    _show_picture(console, prediction)
    _show_speed(console, prediction)
    if (engine := prediction.engine) is not None:
        cache = (
            f"engine   KV cache {_span(engine.kv_cache_bytes)}: {engine.kv_cache_tokens:,} tokens,"
        )
        print_line(
            console, f"{cache} {engine.concurrency:.1f} sequences of the longest length at a time"
        )


def _show_verdict(console: Console, prediction: Prediction) -> None:
    margin = prediction.margin_bytes
    limit = format_bytes(prediction.limit_bytes)
    peak = _span(prediction.peak_memory_bytes)
    if prediction.failure is not None:
        console.print(f"does not fit: it would stop with: {prediction.failure}")
    if prediction.fits:
        console.print(
            f"fits: {peak} of {limit}; {format_bytes(margin.value)} left, at least"
            f" {format_bytes(margin.low)}"
        )
    elif prediction.fits is None:
        console.print(f"can't be decided: {peak} of {limit}")
        for fact in prediction.depends_on:
            console.print(f"  depends on {fact}")
    elif prediction.failure is None:
        lacks = f"{format_bytes(-margin.value)} too much, at least {format_bytes(-margin.high)}"
        console.print(f"does not fit: {peak} of {limit}; {lacks}")
    shorter = prediction.peak_memory_bytes_at_lengths
    if shorter is not None:
        console.print(
            f"At the lengths given: {FITS_IN_WORDS[prediction.fits_at_lengths]}, {_span(shorter)}."
        )
    if prediction.peak_phase is not None:
        torch = _torch_text(prediction)
        console.print(f"The peak is in phase {prediction.peak_phase.name}. {torch}")
    console.print()


def _torch_text(prediction: Prediction) -> str:
    allocated = _span(prediction.torch_peak_allocated_bytes)
    reserved = prediction.torch_peak_reserved_bytes
    difference = "the rest is outside torch"
    if reserved.value > prediction.peak_memory_bytes.value:
        difference = "it counts offloaded memory"
    return f"torch itself: {allocated} allocated, {_span(reserved)} reserved; {difference}."


def _show_picture(console: Console, prediction: Prediction) -> None:
    """Print phases and parts as bars on one scale, with the limit."""
    limit, peak = prediction.limit_bytes, prediction.peak_phase
    highs = [phase.peak_bytes.high for phase in prediction.phases]
    top = max(limit, *highs, prediction.peak_memory_bytes.high)
    label = max([LABEL, *(len(name) + 1 for name in prediction.breakdown)])
    width = max(10, min(WIDEST_BAR, console.width - label - FIGURE - 4))

    def show_bar(name: str, size: Estimate) -> None:
        value, high, mark = (round(count / top * width) for count in (size.value, size.high, limit))
        bar = list((SURE * value).ljust(high, UNSURE).ljust(width + 1))
        bar[min(mark, width)] = LIMIT
        console.print(
            f"  {name:<{label}}{''.join(bar)} {f'{size.value / GIB:.2f} GiB':>{FIGURE}}",
            soft_wrap=True,
        )

    console.print(f"by phase, against the limit of {format_bytes(limit)}", soft_wrap=True)
    for phase in prediction.phases:
        show_bar(phase.name, phase.peak_bytes)
    console.print(f"by part, at the peak{f' ({peak.name})' if peak else ''}", soft_wrap=True)
    for name, size in sorted(prediction.breakdown.items(), key=lambda part: -part[1]):
        if size:
            show_bar(name.replace("_", " "), Estimate.exactly(size))
    console.print()


def _show_speed(console: Console, prediction: Prediction) -> None:
    if prediction.tokens_per_second is None:
        console.print("speed    unknown for this hardware until a measurement on it")
        return
    longest = {
        phase.name: phase.seconds for phase in prediction.phases if phase.seconds is not None
    }
    longest_of = "completions" if "rollout" in longest else "rows"
    print_line(
        console,
        f"speed    {_rate(prediction.tokens_per_second)} at the longest {longest_of};"
        f" {_shares(longest)}",
    )
    if prediction.tokens_per_second_at_lengths is not None:
        shares = _shares(prediction.seconds_at_lengths)
        print_line(
            console,
            f"         {_rate(prediction.tokens_per_second_at_lengths)} at the lengths given;"
            f" {shares}",
        )
    times = prediction.pipeline
    if times is not None:  # engines on GPUs of their own
        sides = f"generation {_seconds(times.generation)} and training {_seconds(times.training)}"
        waited = longest["rollout"].value if "rollout" in longest else 0.0
        waits = "the engines wait for training"
        if waited >= 0.1:
            waits = f"training waits {waited:,.1f} s for completions"
        print_line(console, f"pipeline {sides} per batch, on GPUs of their own; {waits}")


def _seconds(estimate: Estimate) -> str:
    return f"{estimate.value:,.1f} s ({estimate.low:,.1f} to {estimate.high:,.1f})"


def _shares(seconds: Mapping[Phase, Estimate]) -> str:
    total = sum(spent.value for spent in seconds.values())
    shares = {name: spent.value / total for name, spent in seconds.items()} if total else {}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def show_ways(console: Console, ways: Sequence[WayToFit]) -> None:
    """Print the changes that make the candidate of `predict` fit."""
    if not ways:
        console.print("No change of one or two settings makes it surely fit.")
        return
    console.print("Changes that make it fit, the cheapest first:")
    _list_ways(console, ways, flag="--set")


def show_ways_of_baseline(console: Console, ways: Sequence[WayToFit]) -> None:
    """Print the changes that make the baseline of `run` fit, where nothing that was searched
    does.
    """
    if ways:
        console.print("Predicted changes that make the baseline fit, the cheapest first:")
        _list_ways(console, ways, flag="--hold")


def _list_ways(
    console: Console,
    ways: Sequence[WayToFit],
    flag: str,
) -> None:
    for way in ways:
        margin = way.prediction.margin_bytes
        speed = "" if way.speed_ratio is None else f", {way.speed_ratio:.2f} times the speed"
        learning = ", changes what is learned" if way.learning else ""
        console.print(f"  {as_flags(way.change, flag)}")
        console.print(
            f"      leaves {format_bytes(margin.value)} free, at least"
            f" {format_bytes(margin.low)}{speed}{learning}"
        )


def _summary(prediction: Prediction) -> str:
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[prediction.fits]
    why = f" (it would stop with: {prediction.failure})" if prediction.failure else ""
    return (
        f"{verdict}, {_span(prediction.peak_memory_bytes)}, {_rate(prediction.ranking_rate)}{why}"
    )


def _span(estimate: Estimate) -> str:
    if estimate.low == estimate.high:
        return format_bytes(estimate.value)
    return (
        f"{format_bytes(estimate.value)} ({format_bytes(estimate.low)} to"
        f" {format_bytes(estimate.high)})"
    )


def _rate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "speed not known"
    return f"{estimate.value:,.0f} tokens/s ({estimate.low:,.0f} to {estimate.high:,.0f})"


def _knobs(knobs: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={setting_text(value)}" for name, value in knobs.items() if value is not None
    )


def check_document(prediction: Prediction, emulated: Measurement) -> dict[str, Any]:
    """Return the part `check` of `predict --json`; a difference is a share of the emulated
    bytes.
    """
    memory = emulated.memory.on_first(prediction.training_devices)
    pairs: list[tuple[str, float, float | None]] = []
    for phase in prediction.phases:
        emulated_peak = memory.phase_peak_bytes.get(phase.name)
        pairs.append((phase.name, phase.peak_bytes.value, emulated_peak))
    allocated = prediction.torch_peak_allocated_bytes.value
    reserved = prediction.torch_peak_reserved_bytes.value
    pairs += [
        ("peak", prediction.peak_memory_bytes.value, memory.peak_bytes),
        ("torch allocated", allocated, memory.torch_allocated_bytes),
        ("torch reserved", reserved, memory.torch_reserved_bytes),
    ]
    rows = []
    for name, predicted_bytes, emulated_bytes in pairs:
        if emulated_bytes:
            rows.append(
                {
                    "name": name,
                    "predicted_bytes": round(predicted_bytes),
                    "emulated_bytes": round(emulated_bytes),
                    "difference": round(predicted_bytes / emulated_bytes - 1, 6),
                }
            )
    return {
        "basis": "emulated",
        "outcome": emulated.outcome.value,
        "evidence": emulated.failure.evidence if emulated.failure else None,
        "rows": rows,
        "caveats": list(emulated.caveats),
    }


def show_check(console: Console, check: Mapping[str, Any]) -> None:
    """Print the table, or the error that ended the emulated run, and what narrows its meaning."""
    console.print()
    if check["outcome"] != "ok":
        evidence = f": {check['evidence']}" if check["evidence"] else ""
        print_line(console, f"emulated {check['outcome']}{evidence}")
    console.print(f"{'':16}{'predicted':>14}{'emulated':>14}{'difference':>12}", highlight=False)
    for row in check["rows"]:
        predicted, emulated = (
            format_bytes(row["predicted_bytes"]),
            format_bytes(row["emulated_bytes"]),
        )
        console.print(
            f"{row['name']:16}{predicted:>14}{emulated:>14}{row['difference']:>+12.1%}",
            highlight=False,
        )
    for caveat in check["caveats"]:
        print_line(console, f"note     {caveat}")
