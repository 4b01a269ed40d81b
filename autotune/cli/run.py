"""`autotune run`: recommend the fastest configuration that fits."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import DONE, FAULT, INTERRUPTED, NOTHING_FITS, UNDECIDED, interruptible
from autotune.cli.options import RequestCommand, as_json_option, request_options
from autotune.cli.output import say
from autotune.request.command_flags import RunOptions
from autotune.request.flags import Flags

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.api.answers import RunAnswer
    from autotune.core.answer import Recommendation

EXITS = {
    "ok": DONE,
    "failed": FAULT,
    "nothing_fits": NOTHING_FITS,
    "undecided": UNDECIDED,
    "interrupted": INTERRUPTED,
}
"""Status of the document -> exit code."""


@click.command(
    name="run",
    cls=RequestCommand,
    short_help="measure candidates on this machine",
)
@request_options(RunOptions)
@as_json_option()
def command(as_json: bool, **flags: Any) -> int:
    """Measure real training steps of many configurations on this machine, within a memory limit,
    and write the fastest configuration that fits, ready to train with.

    \b
    Examples:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
      autotune run --config train.yaml --memory-limit 38G
      autotune run --model ./my-model --gpus 2xcpu --search num_generations=4,8
      autotune run --script train.py --memory-limit 38G -- --learning_rate 1e-6
      autotune run --framework command --metrics speed.jsonl --search batch=1,2,4 -- \
torchrun train.py --bs {batch}
    """
    # Imported here so that --help answers at once.
    from autotune.api.run_requests import run_flags
    from autotune.cli.waiting import Terminal

    with interruptible(), Terminal(to_stderr=as_json) as terminal:
        answer = run_flags(Flags(**flags), listener=terminal)
        terminal.quiet()
        _show(terminal.output, answer)
        if as_json:
            print(json.dumps(answer.document))
    recommendation = answer.recommendation
    document = answer.document
    if recommendation is not None and recommendation.interrupted:
        progress = _progress_text(recommendation)
        say(f"{progress} Go on with: {document['resume_with']}", sys.stderr)
    if recommendation is not None and recommendation.fault is not None:
        return FAULT
    return EXITS[document["status"]]


def _show(output: Console, answer: RunAnswer) -> None:
    from autotune.report.forecast_text import show_forecast
    from autotune.report.html.render import PAGE
    from autotune.report.terminal import show_answer, show_file

    job = answer.job
    document = answer.document
    confirm_with = document["confirm_with"]
    if answer.forecast is not None:
        show_forecast(output, answer.forecast, document, confirm_with=confirm_with)
    elif answer.recommendation is not None:
        files = [*map(str, answer.files), str(job.out / PAGE)]
        show_answer(output, job, answer.recommendation, files, confirm_with or "")
    show_file(output, document.get("file"))


def _progress_text(answer: Recommendation) -> str:
    probed = answer.counts.probed
    if answer.fault is not None:
        measured = "1 probe was" if probed == 1 else f"{probed} probes were"
        return f"Error: {answer.fault} {measured} measured."
    if not probed:
        return (
            "Interrupted before the first probe had an answer: there is no configuration to write"
            " down yet."
        )
    text = f"Interrupted after {probed} probes; all of them are kept."
    none_fitted = "None of them fitted"
    if probed == 1:
        text = "Interrupted after 1 probe, which is kept."
        none_fitted = "It did not fit"
    if answer.winner is None:
        text += f" {none_fitted}, so there is no configuration to write down yet."
    return text
