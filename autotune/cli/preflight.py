"""`autotune preflight`: proves that a configuration fits here, and hands over to the command that trains with it."""

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

from autotune.cli.exits import DONE, INTERRUPTED, NOTHING_FITS, UNDECIDED
from autotune.cli.signals import interruptible
from autotune.cli.terminal import Terminal
from autotune.cli.words import say
from autotune.errors import BadInput
from autotune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autotune.events import Begun
    from autotune.preflight.check import Preflight, Status

EXIT_CODES: Mapping[Status, int] = {
    "fits": DONE,
    "tuned": DONE,
    "does_not_fit": NOTHING_FITS,
    "nothing_fits": NOTHING_FITS,
    "undecided": UNDECIDED,
    "interrupted": INTERRUPTED,
}

VARIABLE = "AUTOTUNE_CONFIG"
"""Set for COMMAND: the file to train with, for scripts that don't take it as an argument."""


@click.command(name="preflight", short_help="prove that a configuration fits, then start the run")
@click.argument("config", metavar="CONFIG")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--gpus", default="local", show_default=True, metavar="HARDWARE", help="local, 2xlocal, cpu, 2xcpu ...")
@click.option("--python", metavar="PATH", help="The training environment's interpreter; autotune's own otherwise.")
@click.option("--memory-limit", metavar="SIZE", help="Fit into this much, like 38G: per GPU, or for all ranks on a CPU.")
@click.option(
    "--max-prompt-length", type=int, metavar="N", help="Longest prompt, in tokens; the longest of CONFIG's dataset otherwise."
)
@click.option("--tune", is_flag=True, help="Where CONFIG doesn't fit, search for one that learns the same and does.")
@click.option("--budget", default="20m", show_default=True, metavar="TIME", help="With --tune: wall clock for the search.")
@click.option("--space", metavar="NAME|FILE", help="With --tune: the search space; the method's own otherwise.")
@click.option("--out", default="autotune-out", show_default=True, metavar="FOLDER", help="With --tune: where the results go.")
@click.option("--weights", type=click.Choice(["random", "real"]), default="random", show_default=True, help="What probes load.")
@click.option("--dry-run", is_flag=True, help="Answer, and start nothing.")
@click.option("--fresh", is_flag=True, help="Measure again, whatever is on record.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout; after it comes only what COMMAND prints."
)
def command(config: str, words: tuple[str, ...], tune: bool, dry_run: bool, as_json: bool, **flags: Any) -> int:
    """Prove that CONFIG, a file of `trl grpo --config`, fits on this machine, and then become COMMAND. Where the same was
    measured before (model, settings, longest prompt, versions, driver, GPUs, who else uses them), the record answers; else
    one short probe of its worst case does. With --tune, COMMAND gets the tuned file wherever CONFIG stands in its arguments;
    it is in the variable AUTOTUNE_CONFIG as well.

    Exit codes before COMMAND takes over: 2 bad input, 3 it doesn't fit, 4 the training environment can't be used, 5 it ended
    otherwise. After that they are COMMAND's own.

    \b
    Examples:
      autotune preflight train.yaml -- trl grpo --config train.yaml
      autotune preflight train.yaml --tune -- trl grpo --config train.yaml
      autotune preflight train.yaml --memory-limit 38G --dry-run
    """
    # Only now, so that --help answers at once.
    from autotune.asking.flags import Flags
    from autotune.preflight.check import preflight_flags

    _refuse_what_cannot_follow(config, words, tune)
    with interruptible(), _Watching(to_stderr=True) as terminal:
        found = preflight_flags(Flags(config=config, **flags), tune=tune, listener=terminal)
    say(_in_words(found), sys.stderr)
    if as_json:
        print(json.dumps(found.document), flush=True)
    if found.use is not None and words and not dry_run:
        become(with_file(words, config, found.use), found.use)
    return EXIT_CODES[found.status]


class _Watching(Terminal):
    """Nothing is said of a configuration that is on record; of one that is measured, what; of a search, all."""

    def show(self, event: Begun) -> None:
        if len(event.candidates) > 1:
            super().show(event)
        for note in event.notes:
            self.words.print(f"note     {note}")


def _refuse_what_cannot_follow(config: str, words: Sequence[str], tune: bool) -> None:
    """Before any GPU time: a command that isn't there, or that a tuned file would never reach."""
    if not Path(config).is_file():
        raise BadInput(f"{config} is no file.", way_out="Name the YAML file that is given to `trl grpo --config`.")
    if words and shutil.which(words[0]) is None:
        raise BadInput(f"COMMAND {words[0]!r} is no program.", way_out="Write what starts the training behind the two dashes.")
    if tune and words and not any(names(word, config) or VARIABLE in word for word in words):
        raise BadInput(
            f"COMMAND nowhere names {config}, so a tuned file would not reach it.",
            way_out=f"Write -- trl grpo --config {config}, or let a shell read it: -- sh -c '... \"${VARIABLE}\"'.",
        )


def names(word: str, config: str) -> bool:
    """Whether an argument is this file, alone or behind a `--flag=`."""
    return _same_file(word, config) or (word.startswith("-") and "=" in word and _same_file(word.partition("=")[2], config))


def with_file(words: Sequence[str], config: str, use: Path) -> list[str]:
    """The command with the file to train with in place of CONFIG."""
    if _same_file(str(use), config):
        return list(words)
    return [_replaced(word, str(use)) if names(word, config) else word for word in words]


def _replaced(word: str, use: str) -> str:
    return f"{word.partition('=')[0]}={use}" if word.startswith("-") else use


def _same_file(word: str, config: str) -> bool:
    try:
        return word == config or (bool(word) and Path(word).samefile(config))
    except (OSError, ValueError):
        return False


def become(words: Sequence[str], use: Path) -> NoReturn:
    """Nothing of ours stays: the command has this process, its number and its standard streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and a program inherits what is ignored: `train | head` would no longer end by itself.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(words[0], list(words), {**os.environ, VARIABLE: str(use)})


def _in_words(found: Preflight) -> str:
    config, trial = found.question.job.workload.config_file, found.proof.trial
    memory, margin, settings = trial.measurement.memory, trial.verdict.margin_bytes, found.candidate.settings
    source = f"on record, measured {found.proof.when} on {found.proof.where}" if found.from_record else "measured now"
    lengths = f"prompts of {settings.get('max_prompt_length')} and completions of {settings.get('max_completion_length')} tokens"
    told = f"({source}; {lengths}; {format_seconds(found.elapsed_seconds)})"
    if found.fits:
        peak, limit = format_bytes(memory.peak_bytes or 0), format_bytes(memory.limit_bytes)
        return f"{config} fits: peak {peak} of {limit}, {format_bytes(margin or 0)} left {told}"
    if found.fits is None:
        return f"{config} can't be decided: {trial.verdict.why} {told}"
    return f"{config} does not fit: {trial.verdict.why} {told}\n{_what_then(found, str(config))}"


def _what_then(found: Preflight, config: str) -> str:
    match found.status:
        case "tuned":
            return f"Tuned to learn the same, and certified to fit: {found.use}"
        case "nothing_fits":
            return f"Nothing that learns the same fits. `autotune run --config {config}` says what could give way."
        case "does_not_fit":
            return "--tune searches for one that learns the same and fits."
        case "interrupted":
            return "Interrupted: the same command goes on from here."
        case _:
            return "The time was over before the best one found was certified. The same command goes on; --budget gives it more."
