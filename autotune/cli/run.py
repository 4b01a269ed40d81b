"""`autotune run`: measure candidates here, or predict them, and recommend the fastest that fits."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, FAULT, INTERRUPTED, NOTHING_FITS, UNDECIDED
from autotune.cli.question import question_options
from autotune.cli.signals import interruptible
from autotune.cli.words import say

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.api import Tuned
    from autotune.recommendation import Recommendation

_COUNT = click.IntRange(min=1)

EXITS = {"ok": DONE, "failed": FAULT, "nothing_fits": NOTHING_FITS, "undecided": UNDECIDED, "interrupted": INTERRUPTED}
"""By what the answer says of itself."""


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
@click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where probes run: on this machine, or on the nodes of a Ray cluster.",
)
@click.option("--address", metavar="ADDRESS", help="The Ray cluster's, like 10.0.0.1:6379; the one that Ray finds otherwise.")
@click.option("--slots", type=_COUNT, metavar="N", help="So many probes at a time; as many as the job's GPUs fit otherwise.")
@click.option("--storage", metavar="URL", help="Optuna's storage; study.db in the output folder otherwise.")
@click.option("--study", metavar="NAME", help="The study's name in the storage; made from model and hardware otherwise.")
@click.option("--soak", metavar="TIME", help="Run the winner that much longer, like 5m, and watch its memory: beyond the budget.")
@click.option("--resume", is_flag=True, help="Go on with the study: nothing is measured twice.")
@click.option("--fresh", is_flag=True, help="Measure again: throw an earlier study of this name away, and ask no record.")
@click.option("--out", default="autotune-out", show_default=True, metavar="FOLDER", help="Where the results are written.")
@click.option("--metrics", metavar="FILE", help="Of your own command: the JSON lines that tell its speed; - is what it prints.")
@click.option("--speed-pattern", metavar="REGEX", help="Of your own command: what finds its speed in what it prints.")
@click.option("--learning", multiple=True, metavar="K", help="A placeholder of it that changes what is learned. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; progress goes to stderr.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND|ARGUMENTS...]")
def command(as_json: bool, soak: str | None, **flags: Any) -> int:
    """Try real training steps of many configurations on this machine, within a memory limit, and write
    down the fastest that fits, ready to train with.

    \b
    Examples:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
      autotune run --config train.yaml --memory-limit 38G
      autotune run --model ./my-model --gpus 2xcpu --search num_generations=4,8
      autotune run --script train.py --memory-limit 38G -- --learning_rate 1e-6
      autotune run --framework command --metrics speed.jsonl --search batch=1,2,4 -- torchrun train.py --bs {batch}
    """
    # Only now, so that --help answers at once.
    from autotune.api import run_flags
    from autotune.asking.flags import Flags
    from autotune.cli.terminal import Terminal

    with interruptible(), Terminal(to_stderr=as_json) as terminal:
        tuned = run_flags(Flags(**flags), listener=terminal, soak=soak)
        terminal.quiet()
        _show(terminal.words, tuned)
        if as_json:
            print(json.dumps(tuned.document))
    return _exit_code(tuned)


def _show(words: Console, tuned: Tuned) -> None:
    from autotune.report import PAGE, show_answer, show_forecast

    question, described = tuned.question, tuned.document
    if tuned.forecast is not None:
        show_forecast(words, question, tuned.forecast, described, confirm_with=described["confirm_with"])
    elif tuned.recommendation is not None:
        show_answer(words, question, tuned.recommendation, [*map(str, tuned.files), str(question.out / PAGE)])


def _how_far(answer: Recommendation) -> str:
    probed = answer.counts.probed
    if not probed:
        return "Interrupted before the first probe had an answer: there is no configuration to write down yet."
    kept = f"Interrupted after {probed} probes; all of them are kept."
    return kept if answer.winner else f"{kept} None of them fitted, so there is no configuration to write down yet."


def _exit_code(tuned: Tuned) -> int:
    answer = tuned.recommendation
    if answer is not None and answer.interrupted:
        # Everything it measured is kept, and the best so far is written down.
        again = tuned.document["resume_with"]
        say(f"{_how_far(answer)} Go on with: {again}", sys.stderr)
    return EXITS[tuned.document["status"]]
