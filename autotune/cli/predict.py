"""`autotune predict`: memory and speed of one configuration, without a GPU and without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import DONE, NOTHING_FITS, UNDECIDED, interruptible
from autotune.cli.options import RequestCommand, as_json_option, request_options
from autotune.cli.output import PlainConsole
from autotune.cli.waiting import Waiting
from autotune.core.errors import BadInput
from autotune.core.files import write_output
from autotune.core.units import counted, format_bytes
from autotune.request.command_flags import PredictOptions
from autotune.request.flags import Flags

if TYPE_CHECKING:
    from autotune.api.answers import PredictAnswer
    from autotune.core.events import Event, JobStarted
    from autotune.core.prediction import Prediction

EXIT_CODES = {True: DONE, False: NOTHING_FITS, None: UNDECIDED}
"""Exit code: does the configuration fit?"""


@click.command(
    name="predict",
    cls=RequestCommand,
    short_help="say without a GPU whether a configuration fits",
)
@request_options(PredictOptions)
@click.option(
    "--check",
    is_flag=True,
    help="Run the configuration on emulated GPUs too, and show both (needs a CUDA build of torch).",
)
@click.option(
    "--quick",
    is_flag=True,
    help=(
        "Answer at once with a step model of the package, also for other releases than those"
        " installed, instead of tracing their step."
    ),
)
@click.option(
    "--explain",
    is_flag=True,
    help="List every setting with its origin: file and line, flag, variable or default.",
)
@click.option(
    "--map",
    "map_file",
    metavar="FILE",
    type=click.Path(),
    help=(
        "Predict every candidate of the space too, and write an HTML page on which to choose"
        " settings. Example: map.html."
    ),
)
@as_json_option()
def command(
    as_json: bool,
    check: bool,
    quick: bool,
    explain: bool,
    map_file: str | None,
    **flags: Any,
) -> int:
    """Trace the training step of the installed framework on fake tensors, and predict whether it
    fits, by which margin, the parts of its memory, and changes that would help. Nothing is
    measured, and no GPU is needed.

    \b
    Examples:
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G
      autotune predict --config train.yaml --gpus A100-80G --set per_device_train_batch_size=16
      autotune predict --model Llama-3.1-8B --gpus 4xH100 --tuning full --set sharding=zero3
      autotune predict --config train.yaml --gpus A100-40G --unknown per_device_train_batch_size=1,8
      autotune predict --from-command launch.sh --gpus 8xH100-80G --explain
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G --map map.html
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G --check --python .venv/bin/python

    Exit code 0: it fits; 3: it does not; 5: it depends on unknown values, the limit is inside the
    interval, or nothing names the model and another one was predicted (`model_is_guess`).
    """
    # Imported here so that --help answers at once.
    from autotune.api.predictions import check_can_emulate, emulate_flags, predict_flags

    request = Flags(**flags)
    if map_file is not None:
        _refuse_folder(Path(map_file))
    if check:
        check_can_emulate(request)
    output = PlainConsole(to_stderr=as_json)
    with interruptible(), Waiting("tracing the training step") as waiting:
        display = _PredictionDisplay(output, waiting)
        answer = predict_flags(request, quick=quick, listener=display)
    display.show_rest(answer)
    if explain:
        from autotune.request.explanation import explained

        output.print()
        for line in explained(answer.document):
            output.print(line, soft_wrap=True)
    checked = {}
    if check:
        from autotune.report.check_text import check_document, show_check

        with interruptible(), Waiting("emulating the configuration"):
            checked["check"] = check_document(answer.prediction, emulate_flags(request))
        show_check(output, checked["check"])
    if map_file is not None:
        _write_map(request, Path(map_file), output)
    if as_json:
        print(json.dumps({**answer.document, **checked}))
    if answer.job.task.workload.model.is_guess:
        return UNDECIDED
    return EXIT_CODES[answer.prediction.fits]


def _refuse_folder(page: Path) -> None:
    if page.is_dir():
        raise BadInput(
            f"--map {page} is a folder.", way_out=f"Name a file in it: --map {page / 'map.html'}."
        )


def _write_map(
    request: Flags,
    page: Path,
    output: PlainConsole,
) -> None:
    """Predict the space and write its page; print its size."""
    from autotune.report.html.map_page import render_map
    from autotune.search.predicted_space import predict_space

    with interruptible(), Waiting("predicting the candidates of the map"):
        space = predict_space(request)
    content = render_map(space, request).encode()
    write_output(page, content, way_out="Name another file: --map ~/map.html.")
    output.print()
    candidates = counted(len(space.candidates), "candidate")
    output.print(f"map      {page}: {candidates}, {format_bytes(len(content))}", soft_wrap=True)


class _PredictionDisplay:
    """Shows the verdict at once: changes that make it fit take longer to compute."""

    def __init__(self, output: PlainConsole, waiting: Waiting) -> None:
        self._output = output
        self._waiting = waiting
        self._started: JobStarted | None = None
        self._shipped: Prediction | None = None
        self._has_verdict = False
        self._advice_notes: list[str] = []

    def __call__(self, event: Event) -> None:
        from autotune.core.events import CandidatePredicted, JobStarted, Note, ShippedPredicted
        from autotune.report.job_text import print_line
        from autotune.report.prediction_text import show_difference, show_shipped, show_verdict

        if isinstance(event, JobStarted):
            self._started = event
        elif isinstance(event, Note) and self._has_verdict:
            self._advice_notes.append(event.text)
        elif isinstance(event, Note):
            self._waiting.stop()
            print_line(self._output, event.text)
        elif isinstance(event, ShippedPredicted):
            self._shipped = event.prediction
            self._waiting.stop()
            show_shipped(self._output, event.prediction)
            self._waiting.show("tracing the step of the installed releases")
        elif isinstance(event, CandidatePredicted):
            self._waiting.stop()
            self._has_verdict = True
            assert self._started is not None
            show_verdict(self._output, event.prediction, self._started.assumed_of_file)
            if self._shipped is not None:
                show_difference(self._output, event.prediction, self._shipped)
            if not event.prediction.fits:
                self._waiting.show("predicting changes that make it fit")

    def show_rest(self, answer: PredictAnswer) -> None:
        """Show the advice, the evidence, and what was predicted."""
        from autotune.report.prediction_text import (
            show_basis,
            show_evidence,
            show_ways,
            uncounted_savings,
        )

        assert self._started is not None
        if not answer.prediction.fits:
            uncounted = uncounted_savings(self._started.assumed_of_file)
            show_ways(self._output, answer.ways, self._advice_notes, uncounted)
        self._output.print()
        show_evidence(self._output, answer.prediction)
        self._output.print()
        show_basis(
            self._output,
            answer.job,
            answer.candidate,
            answer.prediction,
            assumed=_without(self._started.assumed_of_file, self._started.assumed),
            notes=self._started.notes,
        )


def _without(printed: Sequence[str], assumptions: Sequence[str]) -> list[str]:
    """Return the assumptions that are not printed yet."""
    return [assumption for assumption in assumptions if assumption not in printed]
