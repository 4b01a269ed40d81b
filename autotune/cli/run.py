"""`autotune run`: measure candidates here, or predict them, and recommend the fastest that fits."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, FAULT, INTERRUPTED, NOTHING_FITS, UNDECIDED
from autotune.cli.question import console, question_options
from autotune.cli.signals import interruptible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from autotune.asking import Understood
    from autotune.candidate import Candidate
    from autotune.executors.local import LocalExecutor
    from autotune.recommendation import Recommendation

_COUNT = click.IntRange(min=1)


@click.command(name="run", short_help="measure candidates on this machine")
@question_options
@click.option("--budget", default="20m", show_default=True, metavar="TIME", help="Wall clock for the search, like 20m or 1h30m.")
@click.option("--max-probes", type=_COUNT, default=100, show_default=True, metavar="N", help="At most this many candidates.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "probe", "predict"]),
    default="auto",
    show_default=True,
    help="Measure here (probe), or only predict; auto measures what is here.",
)
@click.option(
    "--sampler",
    type=click.Choice(["value", "tpe", "gp", "random"]),
    default="value",
    show_default=True,
    help="Who chooses the next candidate: gain for its cost (value), or one of Optuna's samplers.",
)
@click.option("--storage", metavar="URL", help="Optuna's storage; study.db in the output folder otherwise.")
@click.option("--study", metavar="NAME", help="The study's name in the storage; made from model and hardware otherwise.")
@click.option("--soak", metavar="TIME", help="Run the winner that much longer, like 5m, and watch its memory: beyond the budget.")
@click.option("--resume", is_flag=True, help="Go on with the study: nothing is measured twice.")
@click.option("--fresh", is_flag=True, help="Measure again: throw an earlier study of this name away, and ask no record.")
@click.option("--out", default="autotune-out", show_default=True, metavar="FOLDER", help="Where the results are written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; progress goes to stderr.")
def command(as_json: bool, soak: str | None, **flags: Any) -> int:
    """Try real training steps of many configurations on this machine, within a memory limit, and write
    down the fastest that fits, ready to train with.

    \b
    Examples:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
      autotune run --config train.yaml --memory-limit 38G
      autotune run --model ./my-model --gpus 2xcpu --search num_generations=4,8
    """
    # Only now, so that --help answers at once.
    from autotune.asking import understand
    from autotune.flags import Flags
    from autotune.report import check_folder
    from autotune.units import parse_seconds

    with interruptible():
        understood = understand(Flags(**flags))
        check_folder(understood.question.out)
        return _run(understood, as_json, None if soak is None else parse_seconds(soak))


def _run(understood: Understood, as_json: bool, soak_seconds: float | None) -> int:
    from autotune.asking import possible_candidates
    from autotune.report import failed_without_memory, show_question
    from autotune.tune import legal_candidates

    candidates = possible_candidates(understood, legal_candidates)
    words = console(to_stderr=as_json)
    show_question(words, understood.question, candidates, assumed=understood.assumed, notes=understood.notes)
    if understood.question.mode == "predict":
        return _forecast(words, understood, candidates, as_json)
    understood, answer = _search(understood, candidates, soak_seconds)
    _deliver(words, understood, answer, as_json)
    if answer.interrupted:
        return _say_how_to_resume(answer)
    if failed_without_memory(answer):
        return FAULT
    return DONE if answer.winner is not None else NOTHING_FITS


def _forecast(words: Console, understood: Understood, candidates: tuple[Candidate, ...], as_json: bool) -> int:
    """Nothing is measured: every candidate is predicted, and what to run on the target is said."""
    from autotune.forecasting import forecast
    from autotune.foresight import open_foresight
    from autotune.report import forecast_document, publish, render, show_forecast
    from autotune.tune import baseline_candidate

    question, trainer = understood.question, understood.trainer
    with contextlib.closing(open_foresight(question, trainer)) as foresight:
        answer = forecast(question, foresight, candidates, baseline_candidate(question, trainer))
    winner, confirm = answer.winner, _typed_for_the_target()
    described = publish(
        question.out,
        None if winner is None else lambda folder: trainer.write_files(winner.candidate, question.job, folder),
        lambda files: forecast_document(question, answer, files, confirm_with=confirm, warnings=understood.notes),
        render,
    )
    show_forecast(words, question, answer, described, confirm_with=confirm)
    if as_json:
        print(json.dumps(described))
    if winner is not None:
        return DONE
    return NOTHING_FITS if answer.screened == answer.candidates else UNDECIDED


def _typed_for_the_target() -> str:
    """What confirms a prediction where the hardware is: the same question, measured."""
    words = sys.argv[1:]
    if "--mode" in words:
        at = words.index("--mode")
        words = words[:at] + words[at + 2 :]
    typed = [word for word in words if word != "--json" and not word.startswith("--mode=")]
    return shlex.join(["autotune", *typed, "--mode", "probe"])


def _search(
    understood: Understood, candidates: tuple[Candidate, ...], soak_seconds: float | None
) -> tuple[Understood, Recommendation]:
    """The answer, and what was understood with the question that it answers."""
    from autotune.answering import Asked, answer
    from autotune.report import Progress

    asked = Asked(
        question=understood.question,
        trainer=understood.trainer,
        candidates=candidates,
        whole_space=understood.whole_space,
        pinned=understood.pinned,
    )
    with contextlib.closing(make_executor(understood)) as executor, Progress(understood.question.space) as progress:
        found = answer(asked, executor, progress, soak_seconds=soak_seconds)
    return replace(understood, question=found.question), found.recommendation


def make_executor(understood: Understood) -> LocalExecutor:
    from autotune.environment import SUPPORTED
    from autotune.executors.local import LocalExecutor

    question, trainer, job = understood.question, understood.trainer, understood.question.job
    return LocalExecutor(
        python=job.workload.python,
        adapter=trainer.adapter,
        ranks=job.hardware.count,
        load_request=lambda candidate: trainer.load_request(candidate, job),
        probe_request=lambda candidate, plan: trainer.probe_request(candidate, job, plan),
        limit_bytes=question.memory_limit_bytes,
        device_kind=job.hardware.kind,
        devices=job.hardware.count,
        supported_versions=SUPPORTED.get(trainer.name),
    )


def _deliver(words: Console, understood: Understood, answer: Recommendation, as_json: bool) -> None:
    """Write the files, then say what is in them."""
    from autotune.report import PAGE, annotate, certificate_lines, document, publish, render, show_answer

    question, trainer, winner = understood.question, understood.trainer, answer.winner
    head = certificate_lines(question, answer.certificate)

    def describe(files: list[str]) -> dict[str, Any]:
        return document(question, answer, files, warnings=understood.notes, commands=_commands(question.out, answer))

    writer = (
        None if winner is None else lambda folder: annotate(trainer.write_files(winner.candidate, question.job, folder), head)
    )
    described = publish(question.out, writer, describe, render)
    files = described["recommendation"]["files"] if described["recommendation"] else []
    show_answer(words, question, answer, [*files, str(question.out / PAGE)])
    if as_json:
        print(json.dumps(described))


def _commands(out: Path, answer: Recommendation) -> dict[str, str]:
    """What to type next. A storage's password is not written down: it would be read by whoever reads the page."""
    from autotune.secrets import without_password

    typed = [without_password(word) for word in sys.argv[1:] if word not in ("--fresh", "--resume", "--json")]
    train = {} if answer.winner is None else {"train": shlex.join(["bash", str(out / "launch.sh")])}
    again = {"measure again": shlex.join(["autotune", *typed, "--fresh"])}
    return {**train, **again, "go on": shlex.join(["autotune", *typed, "--resume"])}


def _say_how_to_resume(answer: Recommendation) -> int:
    """An interrupted search has the best so far, and everything it measured is kept."""
    again = shlex.join(["autotune", *(word for word in sys.argv[1:] if word not in ("--fresh", "--resume")), "--resume"])
    print(f"Interrupted after {answer.counts.probed} probes; all of them are kept. Go on with: {again}", file=sys.stderr)
    return INTERRUPTED
