"""The answer in words and tables, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.candidate import Candidate, KnobValue
from autotune.disturbance import in_words as disturbance_in_words
from autotune.measurement import PHASES, Measurement, Speed
from autotune.question import Question
from autotune.recommendation import Recommendation, Trial
from autotune.report.certificate import certificate_lines, models_in_words
from autotune.report.document import failed_without_memory, found_nothing_out, learning_difference, nearest_miss
from autotune.report.lines import cut, tell
from autotune.report.own_script import show_script
from autotune.report.rows_of_data import data_lines
from autotune.secrets import without_password
from autotune.soak import words_of
from autotune.space import Knob
from autotune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNKNOWN = "not known"
MOST_ROWS = 12
MOST_LETTERS = 160


def show_question(
    console: Console,
    question: Question,
    candidates: Sequence[Candidate],
    *,
    assumed: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """What will be done, before it is done: the assumptions, what is held, and what moves."""
    workload, hardware = question.job.workload, question.job.hardware
    model = workload.model
    tell(console, f"{workload.method} of {model.name} ({model.origin}) with {workload.framework}, on {hardware}")
    tell(console, f"limit    {_limit(question)}")
    if assumed:
        tell(console, f"assumed  {', '.join(assumed)}; name another on the command line to change it")
    held = _assignments(_held(question, candidates))
    if held:
        tell(console, f"held     {held}")
    for effect, label in (
        ("learning", "searched, changes what is learned"),
        ("neutral", "searched, changes only speed and memory"),
    ):
        moving = [knob for knob in _moving(question) if knob.effect_under(workload.held) == effect]
        if moving:
            console.print(label)
        for knob in moving:
            tell(console, f"  {knob.name}: {', '.join(_value(choice) for choice in knob.choices)}")
    for note in (*data_lines(question.data), *(f"note     {note}" for note in notes)):
        tell(console, note)
    kept = f"; study {question.study_name!r} in {without_password(question.storage)}" if question.mode == "probe" else ""
    tell(console, f"out      {question.out}{kept}")
    console.print()


def _moving(question: Question) -> list[Knob]:
    """The knobs that have a choice, in a space where their conditions can hold."""
    return [knob for knob in question.space.knobs if len(knob.choices) > 1 and _can_apply(knob, question)]


def _held(question: Question, candidates: Sequence[Candidate]) -> dict[str, KnobValue]:
    """What every candidate has; a null follows from the rest, and what no candidate tells the framework says nothing."""
    told = {name for candidate in candidates for name in candidate.settings}
    fixed = {knob.name: knob.choices[0] for knob in question.space.knobs if len(knob.choices) == 1 and knob.name in told}
    moving = {knob.name for knob in question.space.knobs if len(knob.choices) > 1}
    held = {name: value for name, value in question.job.workload.held.items() if name not in moving}
    return {name: value for name, value in {**held, **fixed}.items() if value is not None}


def _can_apply(knob: Knob, question: Question) -> bool:
    return all(set(values) & set(question.space[name].choices) for name, values in knob.when.items())


def show_answer(console: Console, question: Question, answer: Recommendation, files: Sequence[str]) -> None:
    """The recommendation with its evidence; or, when nothing fits, how close it came and what was tried."""
    if answer.winner is None:
        _show_nothing_fits(console, question, answer)
    else:
        _show_winner(console, question, answer, answer.winner, files)
    _show_counts(console, answer)


def _show_winner(console: Console, question: Question, answer: Recommendation, winner: Trial, files: Sequence[str]) -> None:
    if answer.relaxed:
        console.print("Nothing fitted at the preferred settings. This had to give way, and changes what is learned:")
        console.print(f"  {_assignments(answer.relaxed)}")
    learned = {change.name: change.recommended for change in answer.changes if change.effect == "learning"}
    if learned and answer.baseline is not None:
        console.print(f"Unlike your baseline, this changes what is learned: {_assignments(learned)}")
    console.print(_side_by_side(question, answer, winner))
    _show_changes(console, answer)
    _show_phases(console, answer, winner)
    _show_runner_ups(console, question, answer, winner)
    _show_trade_offs(console, question, answer, winner)
    for trial in answer.refuted:
        console.print(f"Looked best and did not hold in its longer probe (trial {trial.number}): {trial.verdict.why}")
    _show_proof(console, question, answer)
    show_script(console, question, winner.candidate)
    if files:
        console.print(f"Written: {', '.join(files)}")


def _side_by_side(question: Question, answer: Recommendation, winner: Trial) -> Table:
    proof = answer.certificate or winner
    base = answer.baseline
    table = _table("", "baseline", "recommended")
    table.add_row("outcome", str(base.measurement.outcome) if base else _without(answer), str(proof.measurement.outcome))
    table.add_row(
        f"tokens/s{_at_which_lengths(question)}", _rate(base.measurement.worst if base else None), _rate(proof.measurement.worst)
    )
    if proof.measurement.typical or (base and base.measurement.typical):
        table.add_row(
            "tokens/s, typical completions", _rate(base.measurement.typical if base else None), _rate(proof.measurement.typical)
        )
    table.add_row("peak memory", _peak(base), _peak(proof))
    table.add_row("limit", _limit(question), _limit(question))
    for name, was, becomes in _telling_rows(question, answer, winner):
        table.add_row(name, was, becomes)
    return table


def _without(answer: Recommendation) -> str:
    """Why no baseline was measured: with one to differ from, the search ended before its turn."""
    return "not measured" if answer.changes else "none given, or not legal"


def _at_which_lengths(question: Question) -> str:
    return ", longest completions" if "max_completion_length" in question.space else ""


def _telling_rows(question: Question, answer: Recommendation, winner: Trial) -> Iterator[tuple[str, str, str]]:
    """Knobs that could move or that differ; what is the same everywhere was said at the start."""
    base, after = answer.baseline, winner.candidate.knobs
    before = base.candidate.knobs if base else {change.name: change.baseline for change in answer.changes}
    moving = {knob.name for knob in _moving(question)}
    for name in dict.fromkeys([*before, *after]):
        if name in moving or (base is not None and before.get(name) != after.get(name)):
            yield name, _value(before[name]) if name in before else "-", _value(after[name]) if name in after else "-"


def _show_changes(console: Console, answer: Recommendation) -> None:
    if not answer.changes:
        if answer.baseline is not None:
            console.print("The baseline is already the best that was found.")
        return
    table = _table("changed", "from", "to", "learning?", "why")
    for change in answer.changes:
        learning = "yes" if change.effect == "learning" else "no"
        table.add_row(change.name, _value(change.baseline), _value(change.recommended), learning, change.why)
    console.print(table)


def _show_phases(console: Console, answer: Recommendation, winner: Trial) -> None:
    measured = (answer.certificate or winner).measurement
    peaks, speed = measured.memory.phase_peak_bytes, measured.worst
    if not peaks and speed is None:
        return
    table = _table("phase", "peak memory", "share of the time")
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


def _show_runner_ups(console: Console, question: Question, answer: Recommendation, winner: Trial) -> None:
    if not answer.runner_ups:
        return
    table = _table("Runner-ups, with the same learning knobs", "tokens/s", "peak memory")
    for trial in answer.runner_ups:
        marks = ["the baseline"] if answer.baseline and trial.candidate == answer.baseline.candidate else []
        # A longer probe and a short one are not the same evidence, so the reader is told which this is.
        marks += [] if trial.purpose == "confirm" else ["one short probe"]
        mark = f" ({', '.join(marks)})" if marks else ""
        table.add_row(_unlike(trial, winner, question) + mark, _rate(trial.measurement.ranking_speed), _peak(trial))
    console.print(table)


def _unlike(trial: Trial, winner: Trial, question: Question) -> str:
    """How it differs from the winner, by the knobs that have a choice; the others follow from these."""
    moving = {knob.name for knob in _moving(question)}
    knobs, best = trial.candidate.knobs, winner.candidate.knobs
    return _assignments({name: value for name, value in knobs.items() if name in moving and best.get(name) != value})


def _show_trade_offs(console: Console, question: Question, answer: Recommendation, winner: Trial) -> None:
    if not answer.trade_offs:
        return
    table = _table("Other learning knobs, offered and not taken", "tokens/s", "peak memory", "outcome")
    for trial in answer.trade_offs:
        change = learning_difference(question, trial.candidate, winner.candidate)
        table.add_row(_assignments(change), _rate(trial.measurement.ranking_speed), _peak(trial), str(trial.measurement.outcome))
    console.print(table)


def _show_proof(console: Console, question: Question, answer: Recommendation) -> None:
    if answer.certificate is None:
        console.print(
            "Not confirmed: the budget ran out before the longer worst-case probe. Give more with --budget and --resume."
        )
    else:
        measured = answer.certificate.measurement
        cycles = len(measured.worst.cycle_seconds) if measured.worst else 0
        console.print(
            f"Confirmed by {_what_ran(measured)} ({cycles} timed cycles): "
            f"{answer.certificate.verdict.why}, enforced by {measured.memory.bound_by}."
        )
        for line in certificate_lines(question, answer.certificate):
            tell(console, line)
        held = models_in_words(measured)
        if held is not None:
            console.print(held)
        for caveat in measured.caveats:
            console.print(f"Note: {caveat}")
    if answer.disturbance is not None:
        console.print(disturbance_in_words(answer.disturbance))
    for one in answer.soaks:
        console.print(words_of(one))
    completions = "max_completion_length" in question.space
    if completions and (answer.certificate or answer.winner) and question.job.workload.typical_completion_length is None:
        console.print(
            "Speed is for completions of the longest length only: typical lengths are not known. "
            "Name one with --typical-completion-length to rank by it."
        )


def _what_ran(measured: Measurement) -> str:
    if measured.exercised is not None and measured.exercised.watched == "outside":
        return f"{measured.optimizer_steps} records of the command's own"
    return f"{measured.optimizer_steps} optimizer steps at the longest lengths"


def _show_nothing_fits(console: Console, question: Question, answer: Recommendation) -> None:
    if failed_without_memory(answer):
        console.print("No candidate ran to its end, and none for lack of memory: this says nothing about what fits.")
    elif found_nothing_out(answer):
        ended = "it was interrupted" if answer.interrupted else "the budget was spent"
        console.print(f"Nothing was found out: {ended} before the first probe had an answer.")
    else:
        console.print(f"Nothing fits into {_limit(question)}.")
        miss = nearest_miss(answer)
        if miss is not None:
            console.print(f"Nearest miss: {_short(miss.candidate, question)}")
            console.print(f"  peak {_peak(miss)}; {miss.verdict.why}")
        for name, values in _relaxations_tried(question, answer).items():
            tried = ", ".join(_value(value) for value in values)
            console.print(f"Given up without success: {name} (tried {tried})")
    _show_measured(console, question, answer)
    console.print(_what_next(question, answer))


def _show_measured(console: Console, question: Question, answer: Recommendation) -> None:
    if not answer.trials:
        return
    table = _table("measured", "outcome", "peak memory", "why")
    for trial in answer.trials[:MOST_ROWS]:
        failure = trial.measurement.failure
        why = failure.evidence if failure else trial.verdict.why
        table.add_row(_short(trial.candidate, question), str(trial.measurement.outcome), _peak(trial), cut(why, MOST_LETTERS))
    console.print(table)
    if len(answer.trials) > MOST_ROWS:
        console.print(f"... and {len(answer.trials) - MOST_ROWS} more, in recommendation.json's study.")


def _short(candidate: Candidate, question: Question) -> str:
    """The candidate by the knobs that move."""
    moving = [knob.name for knob in _moving(question)]
    return _assignments({name: value for name, value in candidate.knobs.items() if name in moving}) or "the only candidate"


def _relaxations_tried(question: Question, answer: Recommendation) -> dict[str, list[Any]]:
    """Learning knobs that were searched, in the order in which they give way, with the values that were measured."""
    tried: dict[str, list[Any]] = {}
    for name in (name for name in question.space.relax if name in question.space):
        values = [
            value for value in question.space[name].choices if any(t.candidate.knobs.get(name) == value for t in answer.trials)
        ]
        if len(values) > 1:
            tried[name] = values
    return tried


def _what_next(question: Question, answer: Recommendation) -> str:
    if failed_without_memory(answer):
        return "Next: see the reason above; `--hold` away from the setting that fails, or mend it, then --resume or --fresh."
    if answer.proven != "no better candidate possible":
        return "Next: the space was not searched to its end. Go on with --resume and a larger --budget."
    name = next(iter(question.space.relax), None)
    smaller = f"let {name} go lower (--search {name}=...)" if name else "give --search smaller values"
    return f"Next: {smaller}, raise --memory-limit, or ask for more or larger devices with --gpus."


def _show_counts(console: Console, answer: Recommendation) -> None:
    counts = answer.counts
    console.print(
        f"{counts.probed} probes of {counts.candidates} candidates in {format_seconds(answer.elapsed_seconds)}: "
        f"{counts.out_of_memory} out of memory, {counts.failed} failed, {counts.implied} settled by others, "
        f"{counts.screened} screened, {counts.loads} loads. Result: {answer.proven}."
    )


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if index == 0 or column in ("why", "outcome") else "right")
    return table


def _rate(speed: Speed | None) -> str:
    if speed is None:
        return UNKNOWN
    spread = f" ± {100 * speed.spread:.0f} %" if speed.spread is not None else ""
    return f"{speed.tokens_per_second:,.0f}{spread}"


def _peak(trial: Trial | None) -> str:
    peak = trial.measurement.memory.peak_bytes if trial else None
    return UNKNOWN if peak is None else format_bytes(peak)


def _limit(question: Question) -> str:
    shared = " for all ranks together" if question.job.hardware.memory_is_shared else " per GPU"
    return format_bytes(question.memory_limit_bytes) + (shared if question.job.hardware.count > 1 or shared == " per GPU" else "")


def _assignments(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in knobs.items())


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
