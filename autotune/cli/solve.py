"""`autotune solve`: the largest value of a setting that fits, or the cheapest hardware that
fits.
"""

from __future__ import annotations

import json
from typing import Any

import click

from autotune.cli.exit_codes import DONE, NOTHING_FITS, UNDECIDED, interruptible
from autotune.cli.options import RequestCommand, as_json_option, request_options
from autotune.cli.output import PlainConsole
from autotune.cli.waiting import Waiting
from autotune.core.events import Event, JobStarted, Predicting
from autotune.request.command_flags import SolveOptions
from autotune.request.flags import Flags

EXITS = {"ok": DONE, "nothing_fits": NOTHING_FITS, "undecided": UNDECIDED}
"""Status of the document -> exit code."""


@click.command(
    name="solve",
    cls=RequestCommand,
    short_help="find the largest value or the cheapest GPUs that fit",
)
@click.argument("setting")
@request_options(SolveOptions)
@as_json_option()
def command(setting: str, as_json: bool, **flags: Any) -> int:
    """Predict the largest value of SETTING that fits, with all other settings as given; or, with
    SETTING gpus, the cheapest hardware of a price list that fits. Nothing is measured.

    \b
    Examples:
      autotune solve max_completion_length --model Qwen2.5-7B --gpus A100-40G
      autotune solve per_device_train_batch_size --config train.yaml --gpus 2xA100-80G
      autotune solve gpus --price prices.yaml --model Qwen2.5-7B

    Exit code 0: found; 3: no value, or no hardware, fits; 5: none surely fits, but some may.
    """
    # Imported here so that --help answers at once.
    from autotune.solver import solve_flags
    from autotune.solver.cheapest_hardware import hardware_lines
    from autotune.solver.value_report import value_lines

    output = PlainConsole(to_stderr=as_json)
    with interruptible(), Waiting("reading the request") as waiting:

        def show(event: Event) -> None:
            if isinstance(event, Predicting):
                waiting.show(f"predicting {event.text}")
            elif isinstance(event, JobStarted):
                waiting.stop()
                _show_job(output, event)

        answer = solve_flags(setting, Flags(**flags), listener=show)
    if answer.largest is not None:
        lines = value_lines(answer.largest)
    else:
        assert answer.cheapest is not None
        lines = hardware_lines(answer.cheapest)
    for line in lines:
        output.print(line)
    if as_json:
        print(json.dumps(answer.document))
    return EXITS[answer.document["status"]]


def _show_job(output: PlainConsole, event: JobStarted) -> None:
    workload = event.job.task.workload
    output.print(f"{workload.method} of {workload.model.name} with {workload.framework}")
    for assumption in event.assumed:
        output.print(f"assumed  {assumption}")
    for note in event.notes:
        output.print(f"note     {note}")
