"""`autotune preflight`: proves that a configuration fits here, then starts the training command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from autotune.cli.exit_codes import DONE, INTERRUPTED, NOTHING_FITS, UNDECIDED, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.cli.output import say
from autotune.cli.waiting import Terminal
from autotune.core.errors import BadInput
from autotune.core.measurement import Measurement, Outcome
from autotune.core.units import format_bytes, format_seconds
from autotune.failures.own_code import called_back_in
from autotune.preflight.command_words import VARIABLE, names, with_file
from autotune.request.flags import Flags

if TYPE_CHECKING:
    from autotune.core.events import JobStarted
    from autotune.preflight.check import Preflight, Status

EXIT_CODES: Mapping[Status, int] = {
    "fits": DONE,
    "tuned": DONE,
    "does_not_fit": NOTHING_FITS,
    "nothing_fits": NOTHING_FITS,
    "undecided": UNDECIDED,
    "interrupted": INTERRUPTED,
}


@click.command(name="preflight", short_help="prove that a configuration fits, then start the run")
@click.argument("config", metavar="CONFIG")
@click.argument(
    "command_words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[-- COMMAND...]",
)
@declared_option(
    "gpus", help="Devices of this machine for the job. Example: local, 2xlocal, cpu, 2xcpu."
)
@declared_option("python")
@declared_option("memory_limit")
@declared_option(
    "max_prompt_length", help="Longest prompt, in tokens. Default: the longest of CONFIG's dataset."
)
@click.option(
    "--tune",
    is_flag=True,
    help="If CONFIG doesn't fit, search for a configuration that learns the same and fits.",
)
@declared_option("budget", help="With --tune: wall-clock time for the search. Example: 1h30m.")
@declared_option(
    "space",
    help="With --tune: search space, a shipped name or a YAML file. Default: the method's own.",
)
@declared_option("out", help="With --tune: output folder.")
@declared_option("weights")
@click.option("--dry-run", is_flag=True, help="Print the result, and start nothing.")
@declared_option("fresh", help="Measure again instead of using the record.")
@as_json_option("Print one JSON document on stdout, before the output of COMMAND.")
def command(
    config: str,
    command_words: tuple[str, ...],
    tune: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Prove that CONFIG, a file of `trl grpo --config`, fits on this machine, then become COMMAND.
    An earlier measurement is reused if model, settings, longest prompt, versions, driver, GPUs and
    other processes are the same; else one short worst-case probe runs. With --tune, the tuned file
    replaces CONFIG in COMMAND's arguments. It is also in the variable AUTOTUNE_CONFIG.

    Exit codes before COMMAND starts: 2 bad input, 3 it doesn't fit, 4 the training environment
    can't be used, 5 undecided. Afterwards COMMAND's own.

    \b
    Examples:
      autotune preflight train.yaml -- trl grpo --config train.yaml
      autotune preflight train.yaml --tune -- trl grpo --config train.yaml
      autotune preflight train.yaml --memory-limit 38G --dry-run

    """
    # Imported here so that --help answers at once.
    from autotune.preflight.check import preflight_flags

    check_command(config, command_words)
    _refuse_unreachable(config, command_words, tune)
    with interruptible(), PreflightDisplay(to_stderr=True) as terminal:
        result = preflight_flags(Flags(config=config, **flags), tune=tune, listener=terminal)
    say(result_text(result), sys.stderr)
    if as_json:
        print(json.dumps(result.document), flush=True)
    if result.use is not None and command_words and not dry_run:
        become(with_file(command_words, config, result.use), result.use)
    return EXIT_CODES[result.status]


class PreflightDisplay(Terminal):
    """Terminal output of a preflight: notes of a measurement, everything of a search."""

    def show(self, event: JobStarted) -> None:
        if len(event.candidates) > 1:
            super().show(event)  # with its notes
            return
        for note in event.notes:
            self.output.print(f"note     {note}")


def check_command(config: str, command_words: Sequence[str]) -> None:
    """Refuse a missing file or program, before any GPU time."""
    if not Path(config).is_file():
        raise BadInput(
            f"{config} is no file.",
            way_out="Name the YAML file that is given to `trl grpo --config`.",
        )
    if command_words and shutil.which(command_words[0]) is None:
        raise BadInput(
            f"COMMAND {command_words[0]!r} is no program.",
            way_out="Write what starts the training behind the two dashes.",
        )


def _refuse_unreachable(
    config: str,
    command_words: Sequence[str],
    tune: bool,
) -> None:
    """Refuse a command without a place for the tuned file."""
    if (
        tune
        and command_words
        and not any(names(word, config) or VARIABLE in word for word in command_words)
    ):
        raise BadInput(
            f"COMMAND does not name {config}, so a tuned file would not reach it.",
            way_out=(
                f"Write -- trl grpo --config {config}, or let a shell read it: -- sh -c '..."
                f' "${VARIABLE}"\'.'
            ),
        )


def become(command_words: Sequence[str], use: Path) -> NoReturn:
    """Replace this process by the command, with the same process id and standard streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and programs inherit that: `train | head` would no longer end by
    # itself.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(command_words[0], list(command_words), {**os.environ, VARIABLE: str(use)})


def result_text(result: Preflight) -> str:
    config = result.job.task.workload.config_file
    trial = result.proof.trial
    details = _details(result)
    if result.fits:
        memory = trial.measurement.memory
        margin = trial.verdict.margin_bytes
        peak = format_bytes(memory.peak_bytes or 0)
        limit = format_bytes(memory.limit_bytes)
        return f"{config} fits: peak {peak} of {limit}, {format_bytes(margin or 0)} left {details}"
    crash = _crash(trial.measurement)
    if crash is not None:
        return f"{config}: your run will crash, {crash} {details}"
    if result.fits is None:
        return f"{config} can't be decided: {trial.verdict.why} {details}"
    return f"{config} does not fit: {trial.verdict.why} {details}\n{_way_on(result)}"


def _crash(measurement: Measurement) -> str | None:
    """Return the exception of a probe that the user's own code ended, with its place."""
    failure = measurement.failure
    if measurement.outcome is not Outcome.CRASH or failure is None:
        return None
    place = called_back_in(failure.excerpt)
    if place is None:
        return None
    return f"in {place}: {failure.evidence}"


def _details(result: Preflight) -> str:
    """Return where the proof is from, for which lengths, and its time."""
    source = "measured now"
    settings = result.candidate.settings
    if result.from_record:
        source = f"on record, measured {result.proof.when} on {result.proof.where}"
    lengths = (
        f"prompts of {settings.get('max_prompt_length')} and completions of"
        f" {settings.get('max_completion_length')} tokens"
    )
    return f"({source}; {lengths}; {format_seconds(result.elapsed_seconds)})"


def _way_on(result: Preflight) -> str:
    """Return what a configuration that does not fit leads to."""
    match result.status:
        case "tuned":
            return f"Tuned to learn the same, and certified to fit: {result.use}"
        case "nothing_fits":
            config = result.job.task.workload.config_file
            return (
                f"Nothing that learns the same fits. `autotune run --config {config}` reports what"
                " could be relaxed."
            )
        case "does_not_fit":
            return "--tune searches for one that learns the same and fits."
        case "interrupted":
            return "Interrupted: the same command goes on from here."
        case _:
            return (
                "The time ended before the best configuration was certified. The same command goes"
                " on; --budget gives it more time."
            )
