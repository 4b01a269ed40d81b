"""`autotune predict`: whether one configuration fits, without a GPU and without weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, NOTHING_FITS, UNDECIDED
from autotune.cli.question import console, question_options
from autotune.cli.signals import interruptible

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.events import Begun, Event


@click.command(name="predict", short_help="say without a GPU whether a configuration fits")
@question_options
@click.option(
    "--set", "set_", multiple=True, metavar="K=V", help="What the configuration has, a knob or another setting. May be repeated."
)
@click.option(
    "--unknown",
    multiple=True,
    metavar="K=V1,V2",
    help="What is not known, and the values between which it lies: all are predicted. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; progress goes to stderr.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS...]")
def command(as_json: bool, set_: tuple[str, ...], unknown: tuple[str, ...], **flags: Any) -> int:
    """Follow the training step that the installed framework would run, on tensors without memory, and say whether it
    fits, by how much, what takes the memory, and what would help. Nothing is measured, and no GPU is needed.

    \b
    Examples:
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G
      autotune predict --config train.yaml --gpus A100-80G --set per_device_train_batch_size=16
      autotune predict --model Llama-3.1-8B --gpus 4xH100 --tuning full --set sharding=zero3
      autotune predict --config train.yaml --gpus A100-40G --unknown per_device_train_batch_size=1,8

    Exit code 0: it fits; 3: it does not; 5: it depends on what was not given, or the limit lies inside the interval.
    """
    # Only now, so that --help answers at once.
    from autotune.api import predict_flags
    from autotune.asking.flags import Flags
    from autotune.report import show_ways

    words = console(to_stderr=as_json)
    with interruptible():
        predicted = predict_flags(Flags(**flags, set=set_, unknown=unknown), listener=_Showing(words))
    if not predicted.prediction.fits:
        show_ways(words, predicted.ways)
    if as_json:
        print(json.dumps(predicted.document))
    return {True: DONE, False: NOTHING_FITS, None: UNDECIDED}[predicted.prediction.fits]


class _Showing:
    """Shows the prediction as soon as it is there: what would make it fit takes longer to find."""

    def __init__(self, words: Console) -> None:
        self._words = words
        self._begun: Begun | None = None

    def __call__(self, event: Event) -> None:
        from autotune.events import Begun, Foretold
        from autotune.report import show_prediction

        if isinstance(event, Begun):
            self._begun = event
        elif isinstance(event, Foretold) and self._begun is not None:
            asked = self._begun
            show_prediction(
                self._words, asked.question, event.candidate, event.prediction, assumed=asked.assumed, notes=asked.notes
            )
