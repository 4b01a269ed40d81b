"""Terminal output of a measured answer: its recommendation and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.core.answer import Recommendation, Trial
from autotune.core.job import Job
from autotune.core.measurement import PHASES, Measurement, Speed
from autotune.core.memory_growth import describe_soak
from autotune.core.run_statistics import describe_interference
from autotune.core.space import setting_text
from autotune.core.units import counted, format_bytes, format_seconds
from autotune.frameworks.shares_in_files import for_files
from autotune.frameworks.trl.script_files import advice_for, how_to_apply
from autotune.report.answer_facts import caveats_of, describe_advantage, differing_knobs
from autotune.report.answer_tables import peak_text, rate_text, show_table
from autotune.report.busy_machine import busy_machine_text
from autotune.report.certificate import certificate_lines, describe_models
from autotune.report.job_text import assignments, limit_text, print_line, searched_knobs
from autotune.report.no_winner_text import show_nothing_fits

if TYPE_CHECKING:
    from rich.console import Console

NOT_TIMED = Speed(
    completion_tokens=0,
    cycle_seconds=(),
    cycle_loss_tokens=(),
    prompt_tokens=0,
    phase_seconds={},
)


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
        show_nothing_fits(console, job, answer)
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
        show_table(console, ("changed", "from", "to", "learning?", "why"), changed)
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
            fast = rate_text(trial.measurement.ranking_speed, answer)
            outcome = str(trial.measurement.outcome)
            rows.append((assignments(differing), fast, peak_text(trial), outcome))
        show_table(
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
    baseline_rate = rate_text(baseline_worst, answer)
    rows = [
        ("outcome", _baseline_outcome(answer), str(proof.outcome)),
        (f"{predicted}tokens/s{lengths}", baseline_rate, rate_text(proof.worst, answer)),
    ]
    if proof.typical or baseline_typical:
        kind = "typical completions"
        if proof.typical is not None and proof.typical.drawn:
            kind = "completions of drawn lengths"
        baseline_rate = rate_text(baseline_typical, answer)
        rows.append((f"tokens/s, {kind}", baseline_rate, rate_text(proof.typical, answer)))
    rows.append(
        (f"{emulated}peak memory", peak_text(base), peak_text(answer.certificate or winner))
    )
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
    show_table(console, ("", "baseline", "recommended"), rows)


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
    show_table(console, ("phase", f"{emulated}peak memory", f"{predicted}share of the time"), rows)


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
        rows.append((text, rate_text(trial.measurement.ranking_speed, answer), peak_text(trial)))
    show_table(
        console, ("Runner-ups, with the same learning knobs", "tokens/s", "peak memory"), rows
    )


def _show_proof(
    console: Console,
    job: Job,
    answer: Recommendation,
) -> None:
    # 1. The confirmation.
    if answer.certificate is None:
        console.print(f"Not confirmed: {_why_not_confirmed(answer)}")
    else:
        _show_certificate(console, job, answer.certificate)

    # 2. What a reader has to know of it.
    for caveat in caveats_of(answer):
        console.print(f"Note: {caveat}")
    if answer.disturbance is not None:
        console.print(describe_interference(answer.disturbance))
    for soak in answer.soaks:
        console.print(describe_soak(soak))
    has_completions = "max_completion_length" in job.space
    has_speed = answer.certificate is not None or answer.winner is not None
    if has_completions and has_speed and job.task.workload.typical_completion_length is None:
        console.print(
            "Speed is for completions of the longest length only: typical lengths are not known. "
            "State them with --lengths, or one with --typical-completion-length, to rank by it."
        )


def _why_not_confirmed(answer: Recommendation) -> str:
    if answer.interrupted:
        return f"the search was {answer.proven} before the longer worst-case probe."
    return (
        "the budget ran out before the longer worst-case probe. Give more with --budget and"
        " --resume."
    )


def _show_certificate(
    console: Console,
    job: Job,
    certificate: Trial,
) -> None:
    measured = certificate.measurement
    why = certificate.verdict.why
    unit = "optimizer steps at the longest lengths"
    if measured.exercised is not None and measured.exercised.watched == "outside":
        unit = "records of the command's own"
    length = f"{measured.optimizer_steps} {unit}"
    cycles = len((measured.worst or NOT_TIMED).cycle_seconds)
    if measured.emulated:
        console.print(f"Emulated in {length}: {why}.")
    else:
        console.print(
            f"Confirmed by {length} ({cycles} timed cycles): {why}, enforced by"
            f" {measured.memory.bound_by}."
        )
    for line in certificate_lines(job, certificate):
        print_line(console, line)
    models = describe_models(measured)
    if models is not None:
        console.print(models)


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
