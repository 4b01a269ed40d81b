"""Terminal output of a measured answer: text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Recommendation, Trial
from autotune.core.job import Job
from autotune.core.measurement import PHASES, Measurement, Outcome, Speed
from autotune.core.run_statistics import describe_interference, describe_soak
from autotune.core.space import Candidate, setting_text
from autotune.core.units import counted, format_bytes, format_seconds
from autotune.frameworks.shares_in_files import for_files
from autotune.frameworks.trl.script_files import advice_for, how_to_apply
from autotune.report.answer_facts import (
    caveats_of,
    describe_advantage,
    differing_knobs,
    failed_without_memory,
    has_no_results,
    nearest_miss,
    relative_spread,
)
from autotune.report.busy_machine import busy_machine_text
from autotune.report.certificate import certificate_lines, describe_models
from autotune.report.job_text import assignments, limit_text, print_line, searched_knobs, shorten
from autotune.report.prediction_text import show_ways_of_baseline

if TYPE_CHECKING:
    from rich.console import Console

NOT_KNOWN = "not known"
NOT_TIMED = Speed(
    completion_tokens=0,
    cycle_seconds=(),
    cycle_loss_tokens=(),
    prompt_tokens=0,
    phase_seconds={},
)
MAX_TABLE_ROWS = 12
MAX_CELL_CHARACTERS = 160


def show_answer(
    console: Console,
    job: Job,
    answer: Recommendation,
    files: Sequence[str],
    confirm_with: str = "",
) -> None:
    """Print the recommendation with its evidence; if nothing fits, the nearest miss and the
    relaxed knobs.
    """
    busy = busy_machine_text(answer)
    if busy is not None:
        console.print(busy)
    if answer.winner is None:
        _show_nothing_fits(console, job, answer)
    else:
        _show_winner(console, job, answer, answer.winner, files)
    counts = answer.counts
    console.print(
        f"{counted(counts.probed, 'probe')} of {counted(counts.candidates, 'candidate')} in"
        f" {format_seconds(answer.elapsed_seconds)}: {counts.out_of_memory} out of memory,"
        f" {counts.failed} failed, {counts.implied} pruned by implication, {counts.screened}"
        f" screened, {counted(counts.loads, 'load')}. Result: {answer.proven}."
    )
    if confirm_with:
        console.print(f"Emulated, nothing was measured. Confirm it on the target: {confirm_with}")


def _show_winner(
    console: Console,
    job: Job,
    answer: Recommendation,
    winner: Trial,
    files: Sequence[str],
) -> None:
    # 1. What changed, and what that gains.
    if answer.relaxed:
        console.print(
            "Nothing fitted at the preferred settings. Relaxed, which changes what is learned:"
        )
        console.print(f"  {assignments(answer.relaxed)}")
    learned = {}
    for change in answer.changes:
        if change.effect == "learning":
            learned[change.name] = change.recommended
    if learned and answer.baseline is not None:
        console.print(f"Unlike your baseline, this changes what is learned: {assignments(learned)}")
    _show_side_by_side(console, job, answer, winner)
    if (comparison := describe_advantage(answer)) is not None:
        print_line(console, comparison)
    if answer.changes:
        changed = []
        for change in answer.changes:
            before = setting_text(change.baseline)
            after = setting_text(change.recommended)
            learning = "yes" if change.effect == "learning" else "no"
            changed.append((change.name, before, after, learning, change.why))
        _show_table(console, ("changed", "from", "to", "learning?", "why"), changed)
    elif answer.baseline is not None and answer.advantage is None:
        console.print("The baseline is already the best that was found.")
    _show_phases(console, (answer.certificate or winner).measurement)
    # 2. The alternatives.
    _show_runner_ups(console, job, answer, winner)
    if answer.trade_offs:
        rows = []
        for trial in answer.trade_offs:
            differing = {}
            for knob in job.space.learning_knobs(winner.candidate.settings):
                value = trial.candidate.knobs.get(knob.name)
                if value != winner.candidate.knobs.get(knob.name):
                    differing[knob.name] = value
            fast = _rate(trial.measurement.ranking_speed, answer)
            outcome = str(trial.measurement.outcome)
            rows.append((assignments(differing), fast, _peak(trial), outcome))
        _show_table(
            console,
            ("Other learning knobs, offered and not taken", "tokens/s", "peak memory", "outcome"),
            rows,
        )
    for trial in answer.refuted:
        console.print(f"Failed in its longer probe (trial {trial.number}): {trial.verdict.why}")
    # 3. The evidence, and the files.
    _show_proof(console, job, answer)
    _show_script(console, job, answer)
    if files:
        console.print(f"Written: {', '.join(files)}")


def _show_side_by_side(
    console: Console,
    job: Job,
    answer: Recommendation,
    winner: Trial,
) -> None:
    """Print the figures of the baseline and the recommendation, and the knobs that were searched
    or that differ; the common ones were printed before the search.
    """
    base = answer.baseline
    baseline_worst = baseline_typical = None
    if base is not None:
        baseline_worst = base.measurement.worst
        baseline_typical = base.measurement.typical
    proof = (answer.certificate or winner).measurement

    # 1. Outcome, speed, memory.
    lengths = ", longest completions" if "max_completion_length" in job.space else ""
    predicted, emulated = ("predicted ", "emulated ") if job.task.hardware.emulated else ("", "")
    baseline_rate = _rate(baseline_worst, answer)
    rows = [
        ("outcome", _baseline_outcome(answer), str(proof.outcome)),
        (f"{predicted}tokens/s{lengths}", baseline_rate, _rate(proof.worst, answer)),
    ]
    if proof.typical or baseline_typical:
        kind = "typical completions"
        if proof.typical is not None and proof.typical.drawn:
            kind = "completions of drawn lengths"
        baseline_rate = _rate(baseline_typical, answer)
        rows.append((f"tokens/s, {kind}", baseline_rate, _rate(proof.typical, answer)))
    rows.append((f"{emulated}peak memory", _peak(base), _peak(answer.certificate or winner)))
    rows.append(("limit", limit_text(job), limit_text(job)))

    # 2. Knobs.
    after = winner.candidate.knobs
    before: Mapping[str, Any] = {change.name: change.baseline for change in answer.changes}
    if base is not None:
        before = base.candidate.knobs
    moving = {knob.name for knob in searched_knobs(job)}
    for name in dict.fromkeys([*before, *after]):
        if name in moving or (base is not None and before.get(name) != after.get(name)):
            rows.append((name, _knob_text(before, name), _knob_text(after, name)))
    _show_table(console, ("", "baseline", "recommended"), rows)


def _baseline_outcome(answer: Recommendation) -> str:
    if answer.baseline is not None:
        return str(answer.baseline.measurement.outcome)
    # With changes against a baseline that was not measured, the search ended before its turn.
    return "not measured" if answer.changes else "none given, or not legal"


def _knob_text(knobs: Mapping[str, Any], name: str) -> str:
    if name not in knobs:
        return "-"
    return setting_text(knobs[name])


def _show_phases(console: Console, measured: Measurement) -> None:
    peaks = measured.memory.phase_peak_bytes
    if not peaks and measured.worst is None:
        return
    emulated, predicted = ("emulated ", "predicted ") if measured.emulated else ("", "")
    speed = measured.worst or NOT_TIMED
    total = sum(speed.phase_seconds.values())
    rows = []
    for phase in [*PHASES, "other"]:
        seconds = speed.phase_seconds.get(phase)
        if phase in peaks or seconds:
            peak = format_bytes(peaks[phase]) if phase in peaks else "-"
            rows.append((phase, peak, _percent(seconds, total)))
        if phase == "reward" and speed.user_reward_seconds and total:
            share = "below 1 %"
            if speed.user_reward_seconds >= total / 200:
                share = _percent(speed.user_reward_seconds, total)
            rows.append(("  inside your own functions", "-", share))
    _show_table(console, ("phase", f"{emulated}peak memory", f"{predicted}share of the time"), rows)


def _percent(part: float | None, total: float) -> str:
    if not part or not total:
        return "-"
    return f"{100 * part / total:.0f} %"


def _show_runner_ups(
    console: Console,
    job: Job,
    answer: Recommendation,
    winner: Trial,
) -> None:
    if not answer.runner_ups:
        return
    moving = {knob.name for knob in searched_knobs(job)}
    rows = []
    for trial in answer.runner_ups:
        # 1. The searched knobs that differ; the others follow from these.
        unlike = {}
        for name, value in differing_knobs(winner, trial).items():
            if name in moving:
                unlike[name] = value
        text = assignments(unlike)

        # 2. A short probe is weaker evidence than a confirmation.
        marks = []
        if answer.baseline and trial.candidate == answer.baseline.candidate:
            marks.append("the baseline")
        if trial.purpose != "confirm":
            marks.append("one short probe")
        if marks:
            text += f" ({', '.join(marks)})"
        rows.append((text, _rate(trial.measurement.ranking_speed, answer), _peak(trial)))
    _show_table(
        console, ("Runner-ups, with the same learning knobs", "tokens/s", "peak memory"), rows
    )


def _show_proof(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    if answer.certificate is None:
        ending = (
            "the budget ran out before the longer worst-case probe. Give more with --budget and"
            " --resume."
        )
        if answer.interrupted:
            ending = f"the search was {answer.proven} before the longer worst-case probe."
        console.print(f"Not confirmed: {ending}")
    else:
        measured = answer.certificate.measurement
        why = answer.certificate.verdict.why
        unit = "optimizer steps at the longest lengths"
        if measured.exercised is not None and measured.exercised.watched == "outside":
            unit = "records of the command's own"
        ran = f"{measured.optimizer_steps} {unit}"
        cycles = len((measured.worst or NOT_TIMED).cycle_seconds)
        if measured.emulated:
            console.print(f"Emulated in {ran}: {why}.")
        else:
            console.print(
                f"Confirmed by {ran} ({cycles} timed cycles): {why}, enforced by"
                f" {measured.memory.bound_by}."
            )
        for line in certificate_lines(job, answer.certificate):
            print_line(console, line)
        models = describe_models(measured)
        if models is not None:
            console.print(models)
    for caveat in caveats_of(answer):
        console.print(f"Note: {caveat}")
    if answer.disturbance is not None:
        console.print(describe_interference(answer.disturbance))
    for soak in answer.soaks:
        console.print(describe_soak(soak))
    completions = "max_completion_length" in job.space
    if (
        completions
        and (answer.certificate or answer.winner)
        and job.task.workload.typical_completion_length is None
    ):
        console.print(
            "Speed is for completions of the longest length only: typical lengths are not known. "
            "State them with --lengths, or one with --typical-completion-length, to rank by it."
        )


def _show_nothing_fits(
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
            console.print(f"  peak {_peak(miss)}; {miss.verdict.why}")
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
            rows.append((candidate, outcome, _peak(trial), shorten(why, MAX_CELL_CHARACTERS)))
        _show_table(console, (job.task.hardware.basis, "outcome", "peak memory", "why"), rows)
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
    if answer.proven != "no better candidate possible" and not decided:
        return (
            "Next: the space was not searched to its end. Go on with --resume and a larger"
            " --budget."
        )
    name = next(iter(job.space.relax), None)
    smaller = "give --search smaller values"
    if name:
        smaller = f"let {name} go lower (--search {name}=...)"
    return f"Next: {smaller}, raise --memory-limit, or request more or larger devices with --gpus."


def _show_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        header_style="bold",
    )
    for index, column in enumerate(columns):
        table.add_column(
            column,
            overflow="fold",
            justify="left" if index == 0 or column in ("why", "outcome") else "right",
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _rate(speed: Speed | None, answer: Recommendation) -> str:
    if speed is None:
        return NOT_KNOWN
    text = f"{speed.tokens_per_second:,.0f}"
    spread = relative_spread(speed, answer)
    if spread is not None:
        text += f" ± {100 * spread:.0f} %"
    return text


def _peak(trial: Trial | None) -> str:
    if trial is None or trial.measurement.memory.peak_bytes is None:
        return NOT_KNOWN
    return format_bytes(trial.measurement.memory.peak_bytes)


def _show_script(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    """Print the steps that apply the recommendation to the script."""
    script = job.task.workload.script
    if script is None or answer.winner is None:
        return
    if answer.certificate is None:
        console.print(
            "No patch: one short probe is not enough for it. Go on with --resume and a larger"
            " --budget."
        )
        return
    advice = advice_for(*for_files(answer.winner.candidate, job), script)
    for line in how_to_apply(advice, str(job.out)):
        console.print(line)
    if advice.by_hand:
        console.print(f"To paste: {advice.keyword_arguments}")
    if script.rewards == "skip":
        console.print(
            f"Rewards were not called: add the time of {', '.join(script.look.rewards)} to every"
            " cycle."
        )


def show_file(console: Console, section: Mapping[str, Any] | None) -> None:
    """Print the settings of the written file that the user's does not have, or has otherwise."""
    if section is None:
        return
    by_kind: dict[str, list[str]] = {}
    for row in section["settings"]:
        if row["kind"] == "changed":
            text = f"{row['name']}: {setting_text(row['yours'])} -> {setting_text(row['written'])}"
        elif row["kind"] == "moved":
            text = row["name"]
        else:
            text = f"{row['name']}={setting_text(row['written'])}"
        by_kind.setdefault(row["kind"], []).append(text)
    titles = {
        "changed": f"Unlike in {section['path']}",
        "assumed": "Written out, with the value that holds there anyway",
        "moved": "Now in accelerate.yaml",
    }
    for kind, title in titles.items():
        if kind in by_kind:
            console.print(f"{title}: {', '.join(by_kind[kind])}", soft_wrap=True)
