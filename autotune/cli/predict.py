"""`autotune predict`: whether one configuration fits, without a GPU and without weights."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exits import DONE, NOTHING_FITS, UNDECIDED
from autotune.cli.question import console, question_options
from autotune.cli.signals import interruptible

if TYPE_CHECKING:
    from autotune.asking import Understood


@click.command(name="predict", short_help="say without a GPU whether a configuration fits")
@question_options
@click.option(
    "--set", "set_", multiple=True, metavar="K=V", help="What the configuration has, a knob or another setting. May be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout; progress goes to stderr.")
def command(as_json: bool, set_: tuple[str, ...], **flags: Any) -> int:
    """Follow the training step that the installed framework would run, on tensors without memory, and say whether it
    fits, by how much, what takes the memory, and what would help. Nothing is measured, and no GPU is needed.

    \b
    Examples:
      autotune predict --model Qwen2.5-7B --gpus 2xA100-40G
      autotune predict --config train.yaml --gpus A100-80G --set per_device_train_batch_size=16
      autotune predict --model Llama-3.1-8B --gpus 4xH100 --tuning full --set sharding=zero3

    Exit code 0: it fits; 3: it does not; 5: it depends on what was not given, or the limit lies inside the interval.
    """
    # Only now, so that --help answers at once.
    from autotune.asking import understand
    from autotune.flags import Flags

    with interruptible():
        return _predict(understand(Flags(**flags, set=set_, mode="predict")), as_json)


def _predict(understood: Understood, as_json: bool) -> int:
    from autotune.advice import Adviser
    from autotune.asking import candidate_in_question
    from autotune.foresight import open_foresight
    from autotune.report import prediction_document, show_prediction, show_ways

    question, trainer = understood.question, understood.trainer
    candidate, words = candidate_in_question(understood), console(to_stderr=as_json)
    with contextlib.closing(open_foresight(question, trainer)) as foresight:
        prediction = foresight.predict(candidate)
        show_prediction(words, question, candidate, prediction, assumed=understood.assumed, notes=understood.notes)
        adviser = Adviser(question=question, space=understood.whole_space, trainer=trainer, foresight=foresight)
        ways = () if prediction.fits else adviser.ways_to_fit(candidate, prediction)
    if not prediction.fits:
        show_ways(words, ways)
    if as_json:
        print(json.dumps(prediction_document(question, candidate, prediction, ways)))
    return {True: DONE, False: NOTHING_FITS, None: UNDECIDED}[prediction.fits]
