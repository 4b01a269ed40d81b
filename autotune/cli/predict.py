"""`autotune predict`: memory and speed of one configuration, without a GPU and without weights."""

from __future__ import annotations

import json
from typing import Any

import click

from autotune.cli.exit_codes import DONE, NOTHING_FITS, UNDECIDED, interruptible
from autotune.cli.options import RequestCommand, as_json_option, request_options
from autotune.cli.output import Waiting, console
from autotune.request.flags import Flags, PredictOptions


@click.command(
    name="predict", cls=RequestCommand, short_help="say without a GPU whether a configuration fits"
)
@request_options(PredictOptions)
@click.option(
    "--check",
    is_flag=True,
    help="Run the configuration on emulated GPUs too, and show both (needs a CUDA build of torch).",
)
@as_json_option()
def command(as_json: bool, check: bool, **flags: Any) -> int:
    """Trace the training step of the installed framework on fake tensors, and predict whether it
    fits, by which margin, the parts of its memory, and changes that would help. Nothing is
    measured, and no GPU is needed.

    \b
    Examples:
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G
      autotune predict --config train.yaml --gpus A100-80G --set per_device_train_batch_size=16
      autotune predict --model Llama-3.1-8B --gpus 4xH100 --tuning full --set sharding=zero3
      autotune predict --config train.yaml --gpus A100-40G --unknown per_device_train_batch_size=1,8
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G --check --python .venv/bin/python

    Exit code 0: it fits; 3: it does not; 5: it depends on unknown values, or the limit is inside
    the interval.
    """
    # Imported here so that --help answers at once.
    from autotune.api import check_can_emulate, emulate_flags, predict_flags
    from autotune.core.events import CandidatePredicted, Event, JobStarted
    from autotune.report.forecast_text import check_document, show_check, show_prediction, show_ways

    if check:
        check_can_emulate(Flags(**flags))
    words = console(to_stderr=as_json)
    with interruptible(), Waiting("predicting: the training step is traced") as waiting:
        started: list[JobStarted] = []

        def show(event: Event) -> None:
            """Show the prediction at once: ways to make it fit take longer to compute."""
            if isinstance(event, JobStarted):
                started.append(event)
            elif isinstance(event, CandidatePredicted) and started:
                job, assumed, notes = started[-1].job, started[-1].assumed, started[-1].notes
                waiting.stop()
                show_prediction(
                    words, job, event.candidate, event.prediction, assumed=assumed, notes=notes
                )
                if not event.prediction.fits:
                    waiting.show("predicting changes that make it fit")

        predicted = predict_flags(Flags(**flags), listener=show)
    if not predicted.prediction.fits:
        show_ways(words, predicted.ways)
    document = dict(predicted.document)
    if check:
        with interruptible(), Waiting("emulating the configuration"):
            document["check"] = check_document(predicted.prediction, emulate_flags(Flags(**flags)))
        show_check(words, document["check"])
    if as_json:
        print(json.dumps(document))
    return {True: DONE, False: NOTHING_FITS, None: UNDECIDED}[predicted.prediction.fits]
