"""Terminal output of a measured answer: text and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Recommendation, Trial, setting_text
from autotune.core.candidate import Candidate, KnobValue
from autotune.core.interference import describe_interference
from autotune.core.job import Job
from autotune.core.measurement import PHASES, Measurement, Outcome, Speed
from autotune.core.memory_growth import describe_soak
from autotune.core.secrets import without_password
from autotune.core.space import Knob
from autotune.core.units import format_bytes, format_seconds
from autotune.report.answer_document import (
    caveats_of,
    describe_advantage,
    failed_without_memory,
    has_no_results,
    learning_difference,
    nearest_miss,
    relative_spread,
)
from autotune.report.certificate import certificate_lines, describe_models
from autotune.report.dataset_rows import data_lines
from autotune.report.file_section import show_script
from autotune.report.forecast_text import show_ways_of_baseline
from autotune.report.line_wrapping import print_line, shorten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNKNOWN = "not known"
MAX_ROWS = 12
MAX_CHARACTERS = 160


def show_job(
    console: Console,
    job: Job,
    candidates: Sequence[Candidate],
    *,
    assumed: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """Print the job before the search: assumptions, held settings, searched knobs."""
    workload, hardware = job.task.workload, job.task.hardware
    model = workload.model
    print_line(console, f"{workload.method} of {model.name} ({model.origin}) with {workload.framework}, on {hardware}")
    print_line(console, f"limit    {_limit(job)}")
    if assumed:
        print_line(console, f"assumed  {', '.join(assumed)}; name another on the command line to change it")
    held = _assignments(_held(job, candidates))
    if held:
        print_line(console, f"held     {held}")
    for effect, label in (
        ("learning", "searched, changes what is learned"),
        ("neutral", "searched, changes only speed and memory"),
    ):
        moving = [knob for knob in _moving(job) if knob.effect_under(workload.held) == effect]
        if moving:
            console.print(label)
        for knob in moving:
            print_line(console, f"  {knob.name}: {', '.join(setting_text(choice) for choice in knob.choices)}")
    for note in (*data_lines(job.data), *(f"note     {note}" for note in notes)):
        print_line(console, note)
    kept = f"; study {job.study_name!r} in {without_password(job.storage)}" if job.mode != "predict" else ""
    print_line(console, f"out      {job.out}{kept}")
    console.print()


def _moving(job: Job) -> list[Knob]:
    """Return the knobs with several choices whose conditions can hold in this space."""
    return [
        knob
        for knob in job.space.knobs
        if len(knob.choices) > 1 and all(set(values) & set(job.space[name].choices) for name, values in knob.when.items())
    ]


def _held(job: Job, candidates: Sequence[Candidate]) -> dict[str, KnobValue]:
    """Return the settings common to all candidates, without nulls and without settings that none
    passes on."""
    passed = {name for candidate in candidates for name in candidate.settings}
    fixed = {knob.name: knob.choices[0] for knob in job.space.knobs if len(knob.choices) == 1 and knob.name in passed}
    moving = {knob.name for knob in job.space.knobs if len(knob.choices) > 1}
    held = {name: value for name, value in job.task.workload.held.items() if name not in moving}
    return {name: value for name, value in {**held, **fixed}.items() if value is not None}


def show_answer(console: Console, job: Job, answer: Recommendation, files: Sequence[str], confirm_with: str = "") -> None:
    """Print the recommendation with its evidence; if nothing fits, the nearest miss and the
    relaxed knobs."""
    if answer.winner is None:
        _show_nothing_fits(console, job, answer)
    else:
        _show_winner(console, job, answer, answer.winner, files)
    _show_counts(console, answer)
    if confirm_with:
        console.print(f"Emulated, nothing was measured. Confirm it on the target: {confirm_with}")


def _show_winner(console: Console, job: Job, answer: Recommendation, winner: Trial, files: Sequence[str]) -> None:
    if answer.relaxed:
        console.print("Nothing fitted at the preferred settings. Relaxed, which changes what is learned:")
        console.print(f"  {_assignments(answer.relaxed)}")
    learned = {change.name: change.recommended for change in answer.changes if change.effect == "learning"}
    if learned and answer.baseline is not None:
        console.print(f"Unlike your baseline, this changes what is learned: {_assignments(learned)}")
    console.print(_side_by_side(job, answer, winner))
    if (comparison := describe_advantage(answer)) is not None:
        print_line(console, comparison)
    _show_changes(console, answer)
    _show_phases(console, answer, winner)
    _show_runner_ups(console, job, answer, winner)
    _show_trade_offs(console, job, answer, winner)
    for trial in answer.refuted:
        console.print(f"Failed in its longer probe (trial {trial.number}): {trial.verdict.why}")
    _show_proof(console, job, answer)
    show_script(console, job, answer)
    if files:
        console.print(f"Written: {', '.join(files)}")


def _side_by_side(job: Job, answer: Recommendation, winner: Trial) -> Table:
    proof = answer.certificate or winner
    base = answer.baseline
    table = _table("", "baseline", "recommended")
    lengths = ", longest completions" if "max_completion_length" in job.space else ""
    table.add_row("outcome", str(base.measurement.outcome) if base else _why_no_baseline(answer), str(proof.measurement.outcome))
    table.add_row(
        f"{_mark(job, 'predicted')}tokens/s{lengths}",
        _rate(base.measurement.worst if base else None, answer),
        _rate(proof.measurement.worst, answer),
    )
    if proof.measurement.typical or (base and base.measurement.typical):
        table.add_row(
            "tokens/s, completions of drawn lengths" if _drawn(proof) else "tokens/s, typical completions",
            _rate(base.measurement.typical if base else None, answer),
            _rate(proof.measurement.typical, answer),
        )
    table.add_row(f"{_mark(job, 'emulated')}peak memory", _peak(base), _peak(proof))
    table.add_row("limit", _limit(job), _limit(job))
    for name, was, becomes in _knob_rows(job, answer, winner):
        table.add_row(name, was, becomes)
    return table


def _mark(job: Job, word: str) -> str:
    """Return the word for a figure that was not measured, on emulated GPUs."""
    return f"{word} " if job.task.hardware.emulated else ""


def _why_no_baseline(answer: Recommendation) -> str:
    """Return the reason that no baseline was measured; with changes against one, the search
    ended before its turn."""
    return "not measured" if answer.changes else "none given, or not legal"


def _drawn(trial: Trial) -> bool:
    return trial.measurement.typical is not None and trial.measurement.typical.drawn


def _knob_rows(job: Job, answer: Recommendation, winner: Trial) -> Iterator[tuple[str, str, str]]:
    """Yield knobs that were searched or that differ; the common ones were printed before the
    search."""
    base, after = answer.baseline, winner.candidate.knobs
    before = base.candidate.knobs if base else {change.name: change.baseline for change in answer.changes}
    moving = {knob.name for knob in _moving(job)}
    for name in dict.fromkeys([*before, *after]):
        if name in moving or (base is not None and before.get(name) != after.get(name)):
            yield name, setting_text(before[name]) if name in before else "-", setting_text(after[name]) if name in after else "-"


def _show_changes(console: Console, answer: Recommendation) -> None:
    if not answer.changes:
        if answer.baseline is not None and answer.advantage is None:
            console.print("The baseline is already the best that was found.")
        return
    table = _table("changed", "from", "to", "learning?", "why")
    for change in answer.changes:
        learning = "yes" if change.effect == "learning" else "no"
        table.add_row(change.name, setting_text(change.baseline), setting_text(change.recommended), learning, change.why)
    console.print(table)


def _show_phases(console: Console, answer: Recommendation, winner: Trial) -> None:
    measured = (answer.certificate or winner).measurement
    peaks, speed = measured.memory.phase_peak_bytes, measured.worst
    if not peaks and speed is None:
        return
    emulated, predicted = ("emulated ", "predicted ") if measured.emulated else ("", "")
    table = _table("phase", f"{emulated}peak memory", f"{predicted}share of the time")
    total = sum(speed.phase_seconds.values()) if speed else 0.0
    for phase in [*PHASES, "other"]:
        seconds = speed.phase_seconds.get(phase) if speed else None
        if phase in peaks or seconds:
            share = f"{100 * seconds / total:.0f} %" if seconds and total else "-"
            table.add_row(phase, format_bytes(peaks[phase]) if phase in peaks else "-", share)
        if phase == "reward" and speed and speed.user_reward_seconds and total:
            table.add_row("  inside your own functions", "-", _own_share(speed.user_reward_seconds, total))
    console.print(table)


def _own_share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.0f} %" if seconds >= total / 200 else "below 1 %"


def _show_runner_ups(console: Console, job: Job, answer: Recommendation, winner: Trial) -> None:
    if not answer.runner_ups:
        return
    table = _table("Runner-ups, with the same learning knobs", "tokens/s", "peak memory")
    for trial in answer.runner_ups:
        marks = ["the baseline"] if answer.baseline and trial.candidate == answer.baseline.candidate else []
        # A short probe is weaker evidence than a confirmation.
        marks += [] if trial.purpose == "confirm" else ["one short probe"]
        mark = f" ({', '.join(marks)})" if marks else ""
        table.add_row(_unlike(trial, winner, job) + mark, _rate(trial.measurement.ranking_speed, answer), _peak(trial))
    console.print(table)


def _unlike(trial: Trial, winner: Trial, job: Job) -> str:
    """Return the searched knobs in which the trial differs from the winner; the others follow
    from these."""
    moving = {knob.name for knob in _moving(job)}
    knobs, best = trial.candidate.knobs, winner.candidate.knobs
    return _assignments({name: value for name, value in knobs.items() if name in moving and best.get(name) != value})


def _show_trade_offs(console: Console, job: Job, answer: Recommendation, winner: Trial) -> None:
    if not answer.trade_offs:
        return
    table = _table("Other learning knobs, offered and not taken", "tokens/s", "peak memory", "outcome")
    for trial in answer.trade_offs:
        change = learning_difference(job, trial.candidate, winner.candidate)
        fast = _rate(trial.measurement.ranking_speed, answer)
        table.add_row(_assignments(change), fast, _peak(trial), str(trial.measurement.outcome))
    console.print(table)


def _show_proof(console: Console, job: Job, answer: Recommendation) -> None:
    if answer.certificate is None:
        console.print(
            f"Not confirmed: the search was {answer.proven} before the longer worst-case probe."
            if answer.interrupted
            else "Not confirmed: the budget ran out before the longer worst-case probe. Give more with --budget and --resume."
        )
    else:
        measured = answer.certificate.measurement
        cycles = len(measured.worst.cycle_seconds) if measured.worst else 0
        console.print(
            f"Emulated in {_what_ran(measured)}: {answer.certificate.verdict.why}."
            if measured.emulated
            else f"Confirmed by {_what_ran(measured)} ({cycles} timed cycles): "
            f"{answer.certificate.verdict.why}, enforced by {measured.memory.bound_by}."
        )
        for line in certificate_lines(job, answer.certificate):
            print_line(console, line)
        held = describe_models(measured)
        if held is not None:
            console.print(held)
    for caveat in caveats_of(answer):
        console.print(f"Note: {caveat}")
    if answer.disturbance is not None:
        console.print(describe_interference(answer.disturbance))
    for one in answer.soaks:
        console.print(describe_soak(one))
    completions = "max_completion_length" in job.space
    if completions and (answer.certificate or answer.winner) and job.task.workload.typical_completion_length is None:
        console.print(
            "Speed is for completions of the longest length only: typical lengths are not known. "
            "State them with --lengths, or one with --typical-completion-length, to rank by it."
        )


def _what_ran(measured: Measurement) -> str:
    if measured.exercised is not None and measured.exercised.watched == "outside":
        return f"{measured.optimizer_steps} records of the command's own"
    return f"{measured.optimizer_steps} optimizer steps at the longest lengths"


def _show_nothing_fits(console: Console, job: Job, answer: Recommendation) -> None:
    if failed_without_memory(answer):
        fitted = any(trial.verdict.fits for trial in answer.trials)
        if fitted and any(trial.purpose == "confirm" for trial in answer.trials):
            console.print("What fitted failed in the longer run that confirms it, and not for lack of memory.")
        elif fitted:
            console.print("What fitted was not confirmed by a longer run, so nothing is recommended.")
        else:
            console.print("No candidate ran to its end, and none for lack of memory: whether any fits is unknown.")
    elif has_no_results(answer):
        ended = f"it was {answer.proven}" if answer.interrupted else "the budget was spent"
        console.print(f"Nothing was found out: {ended} before the first probe had an answer.")
    else:
        crashed = sum(trial.measurement.outcome is Outcome.CRASH for trial in answer.trials)
        console.print(f"Nothing that ran to its end fits into {_limit(job)}." if crashed else f"Nothing fits into {_limit(job)}.")
        if crashed:
            console.print(f"{crashed} probes crashed, which says nothing about memory: see the reasons below.")
        miss = nearest_miss(answer)
        if miss is not None:
            console.print(f"Nearest miss: {_short(miss.candidate, job)}")
            console.print(f"  peak {_peak(miss)}; {miss.verdict.why}")
        for name, values in _relaxations_tried(job, answer).items():
            tried = ", ".join(setting_text(value) for value in values)
            console.print(f"Given up without success: {name} (tried {tried})")
    _show_measured(console, job, answer)
    show_ways_of_baseline(console, answer.ways_to_fit)
    console.print(_what_next(job, answer))


def _show_measured(console: Console, job: Job, answer: Recommendation) -> None:
    if not answer.trials:
        return
    table = _table(job.task.hardware.basis, "outcome", "peak memory", "why")
    for trial in answer.trials[:MAX_ROWS]:
        failure = trial.measurement.failure
        why = failure.evidence if failure else trial.verdict.why
        table.add_row(_short(trial.candidate, job), str(trial.measurement.outcome), _peak(trial), shorten(why, MAX_CHARACTERS))
    console.print(table)
    if len(answer.trials) > MAX_ROWS:
        console.print(f"... and {len(answer.trials) - MAX_ROWS} more, in recommendation.json's study.")


def _short(candidate: Candidate, job: Job) -> str:
    """Return the candidate's searched knobs."""
    moving = [knob.name for knob in _moving(job)]
    return _assignments({name: value for name, value in candidate.knobs.items() if name in moving}) or "the only candidate"


def _relaxations_tried(job: Job, answer: Recommendation) -> dict[str, list[Any]]:
    """Return the searched learning knobs in their relaxation order, with the measured values."""
    tried: dict[str, list[Any]] = {}
    for name in (name for name in job.space.relax if name in job.space):
        values = [value for value in job.space[name].choices if any(t.candidate.knobs.get(name) == value for t in answer.trials)]
        if len(values) > 1:
            tried[name] = values
    return tried


def _what_next(job: Job, answer: Recommendation) -> str:
    if failed_without_memory(answer):
        return "Next: see the reason above. `--hold` another value of the failing setting, or fix it; then --resume or --fresh."
    if answer.interrupted:
        return f"Next: the search was {answer.proven}. Go on with --resume."
    counts = answer.counts
    decided = counts.probed + counts.screened + counts.implied >= counts.candidates
    if answer.proven != "no better candidate possible" and not decided:
        return "Next: the space was not searched to its end. Go on with --resume and a larger --budget."
    name = next(iter(job.space.relax), None)
    smaller = f"let {name} go lower (--search {name}=...)" if name else "give --search smaller values"
    return f"Next: {smaller}, raise --memory-limit, or request more or larger devices with --gpus."


def _show_counts(console: Console, answer: Recommendation) -> None:
    counts = answer.counts
    console.print(
        f"{counts.probed} probes of {counts.candidates} candidates in {format_seconds(answer.elapsed_seconds)}: "
        f"{counts.out_of_memory} out of memory, {counts.failed} failed, {counts.implied} pruned by implication, "
        f"{counts.screened} screened, {counts.loads} loads. Result: {answer.proven}."
    )


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if index == 0 or column in ("why", "outcome") else "right")
    return table


def _rate(speed: Speed | None, answer: Recommendation) -> str:
    if speed is None:
        return UNKNOWN
    spread = relative_spread(speed, answer)
    return f"{speed.tokens_per_second:,.0f}" + (f" ± {100 * spread:.0f} %" if spread is not None else "")


def _peak(trial: Trial | None) -> str:
    peak = trial.measurement.memory.peak_bytes if trial else None
    return UNKNOWN if peak is None else format_bytes(peak)


def _limit(job: Job) -> str:
    shared = " for all ranks together" if job.task.hardware.memory_is_shared else " per GPU"
    return format_bytes(job.memory_limit_bytes) + (shared if job.task.hardware.count > 1 or shared == " per GPU" else "")


def _assignments(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={setting_text(value)}" for name, value in knobs.items())
