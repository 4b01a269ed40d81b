"""`autotune run`: measure candidates here and recommend the fastest that fits."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, FAULT, INTERRUPTED, NOTHING_FITS
from autotune.cli.signals import interruptible

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.asking import Understood
    from autotune.candidate import Candidate
    from autotune.executors.local import LocalExecutor
    from autotune.recommendation import Recommendation

_COUNT = click.IntRange(min=1)


@click.command(name="run", short_help="measure candidates on this machine")
@click.option(
    "--model", metavar="NAME|ID|FOLDER", help="A name of `autotune show models`, a hub id in the local cache, or a folder."
)
@click.option("--gpus", default="local", show_default=True, metavar="HARDWARE", help="local, 2xA100-40G, cpu, 2xcpu ...")
@click.option("--method", default="grpo", show_default=True, metavar="METHOD", help="What is trained: grpo.")
@click.option("--framework", default="trl", show_default=True, metavar="NAME", help="What trains it: trl.")
@click.option("--python", metavar="PATH", help="The training environment's interpreter; autotune's own otherwise.")
@click.option("--tuning", type=click.Choice(["full", "lora", "qlora"]), help="What of the model is trained.")
@click.option("--lora-rank", type=int, metavar="N", help="Rank of the adapter.")
@click.option("--max-prompt-length", type=int, metavar="N", help="Longest prompt, in tokens; held.")
@click.option("--max-completion-length", type=int, metavar="N", help="Longest completion, in tokens; held.")
@click.option(
    "--typical-completion-length", type=int, metavar="N", help="How long completions usually are; speed is ranked by it."
)
@click.option("--num-generations", type=int, metavar="N", help="Completions per prompt; held.")
@click.option("--global-batch", type=int, metavar="N", help="Completions per optimizer step, over all GPUs; held.")
@click.option("--dataset", metavar="NAME|FOLDER", help="Your prompts, as the framework would load them.")
@click.option(
    "--config", metavar="FILE", help="Your own YAML of `trl grpo --config`: the baseline; what it says about learning is held."
)
@click.option("--hold", multiple=True, metavar="K=V", help="Hold a knob or another setting at a value. May be repeated.")
@click.option("--search", multiple=True, metavar="K=V1,V2", help="Let a knob move over these values. May be repeated.")
@click.option("--memory-limit", metavar="SIZE", help="Fit into this much, like 38G: per GPU, or for all ranks on a CPU.")
@click.option("--weights", type=click.Choice(["random", "real"]), default="random", show_default=True, help="What probes load.")
@click.option("--seed", type=int, default=42, show_default=True, metavar="N", help="Seeds probes and the search.")
@click.option(
    "--space", default="grpo", show_default=True, metavar="NAME|FILE", help="A name of `autotune show spaces`, or a file."
)
@click.option("--budget", default="20m", show_default=True, metavar="TIME", help="Wall clock for the search, like 20m or 1h30m.")
@click.option("--max-probes", type=_COUNT, default=100, show_default=True, metavar="N", help="At most this many candidates.")
@click.option(
    "--mode", type=click.Choice(["auto", "probe"]), default="auto", show_default=True, help="How candidates are judged."
)
@click.option("--sampler", type=click.Choice(["tpe", "gp", "random"]), default="tpe", show_default=True, help="Optuna's sampler.")
@click.option("--storage", metavar="URL", help="Optuna's storage; study.db in the output folder otherwise.")
@click.option("--study", metavar="NAME", help="The study's name in the storage; made from model and hardware otherwise.")
@click.option("--resume", is_flag=True, help="Go on with the study: nothing is measured twice.")
@click.option("--fresh", is_flag=True, help="Throw an earlier study of this name away.")
@click.option("--out", default="autotune-out", show_default=True, metavar="FOLDER", help="Where the results are written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; progress goes to stderr.")
def command(as_json: bool, **flags: Any) -> int:
    """Try real training steps of many configurations on this machine, within a memory limit, and write
    down the fastest that fits, ready to train with.

    \b
    Examples:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
      autotune run --config train.yaml --memory-limit 38G
      autotune run --model ./my-model --gpus 2xcpu --search num_generations=4,8
    """
    # Only now, so that --help answers at once.
    from autotune.asking import Flags, understand
    from autotune.report import check_folder

    with interruptible():
        understood = understand(Flags(**flags))
        check_folder(understood.question.out)
        return _run(understood, as_json)


def _run(understood: Understood, as_json: bool) -> int:
    from autotune.asking import possible_candidates
    from autotune.report import failed_without_memory, show_question
    from autotune.tune import legal_candidates

    candidates = possible_candidates(understood, legal_candidates)
    words = _console(to_stderr=as_json)
    show_question(words, understood.question, candidates, assumed=understood.assumed, notes=understood.notes)
    answer = _search(understood, candidates)
    if answer.interrupted:
        return _say_how_to_resume(words, understood, answer, as_json)
    _deliver(words, understood, answer, as_json)
    if failed_without_memory(answer):
        return FAULT
    return DONE if answer.winner is not None else NOTHING_FITS


def _search(understood: Understood, candidates: tuple[Candidate, ...]) -> Recommendation:
    from autotune.report import Progress
    from autotune.study import open_study
    from autotune.tune import Clock, baseline_candidate, tune

    question, trainer = understood.question, understood.trainer
    clock = Clock(question.budget_seconds)
    with contextlib.closing(make_executor(understood)) as executor, Progress(question.space) as progress:
        # The training environment is tried before the study is opened: where it will not do, nothing is left behind.
        executor.prepare()
        if question.storage.startswith(f"sqlite:///{question.out.resolve()}"):
            question.out.mkdir(parents=True, exist_ok=True)
        study = open_study(question, candidates, baseline_candidate(question, trainer))
        return tune(question, study=study, executor=executor, listener=progress, clock=clock)


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
        supported_versions=SUPPORTED.get(trainer.name),
    )


def _deliver(words: Console, understood: Understood, answer: Recommendation, as_json: bool) -> None:
    """Write the files, then say what is in them."""
    from autotune.report import document, publish, show_answer

    question, trainer, winner = understood.question, understood.trainer, answer.winner

    def describe(files: list[str]) -> dict[str, Any]:
        return document(question, answer, files, warnings=understood.notes)

    writer = None if winner is None else lambda folder: trainer.write_files(winner.candidate, question.job, folder)
    described = publish(question.out, writer, describe)
    files = described["recommendation"]["files"] if described["recommendation"] else []
    show_answer(words, question, answer, files)
    if as_json:
        print(json.dumps(described))


def _say_how_to_resume(words: Console, understood: Understood, answer: Recommendation, as_json: bool) -> int:
    """An interrupted search has no answer yet, and everything it measured is kept."""
    from autotune.report import document

    typed = [word for word in sys.argv[1:] if word not in ("--fresh", "--resume")]
    again = shlex.join(["autotune", *typed, "--resume"])
    print(f"Interrupted after {answer.counts.probed} probes; all of them are kept. Go on with: {again}", file=sys.stderr)
    if as_json:
        described = document(understood.question, answer, [], warnings=understood.notes)
        print(json.dumps({**described, "status": "interrupted", "resume_with": again}))
    return INTERRUPTED


def _console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # Without a terminal there is no width to ask for, and rich would take 80.
    terminal = stream.isatty()
    return Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=not terminal, width=None if terminal else 120
    )
