"""`autotune guard`: starts a training, watches it, and starts it again where memory ran out."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.exit_codes import FAULT, NOTHING_FITS, interruptible
from autotune.cli.options import as_json_option, declared_option
from autotune.cli.output import say
from autotune.cli.preflight import EXIT_CODES, PreflightDisplay, check_command, result_text
from autotune.core.errors import BadInput
from autotune.preflight.command_words import VARIABLE, names
from autotune.request.flags import Flags

if TYPE_CHECKING:
    from autotune.guard.guarding import Guarded
    from autotune.guard.training import Training
    from autotune.guard.watch import GuardOptions
    from autotune.preflight.check import Preflight

COMMAND_KEY = "autotune.guard.words"  # of the command, in click's context


class _GuardCommand(click.Command):
    """Command with everything behind two dashes as the command to start."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[COMMAND_KEY] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


@click.command(
    name="guard",
    cls=_GuardCommand,
    short_help="start a training, and start it again where memory ran out",
    options_metavar="[OPTIONS]",
)
@click.argument("config", metavar="[CONFIG] -- COMMAND...", required=False)
@declared_option(
    "gpus", help="Devices of this machine for the job. Example: local, 2xlocal, cpu, 2xcpu."
)
@declared_option("python")
@declared_option("memory_limit")
@declared_option(
    "max_prompt_length", help="Longest prompt, in tokens. Default: the longest of CONFIG's dataset."
)
@declared_option("weights")
@declared_option("fresh", help="Prove by a new measurement instead of the record.")
@click.option("--no-proof", is_flag=True, help="Start without proving that CONFIG fits.")
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Starts after the first one.",
)
@click.option(
    "--may-change",
    multiple=True,
    metavar="NAME",
    help="Setting that may change although it changes what is learned. Repeatable.",
)
@click.option(
    "--early",
    is_flag=True,
    help="If the peak grows towards the limit, save and restart before it is reached.",
)
@click.option("--end-hangs", is_flag=True, help="End a run that makes no step, and restart it.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the last checkpoint of an earlier guarded run in --out, if there is one.",
)
@click.option(
    "--values",
    multiple=True,
    metavar="NAME=V1,V2",
    help="Values of {NAME} in COMMAND, the next one each time memory runs out. Repeatable.",
)
@click.option(
    "--checkpoints",
    metavar="PATTERN",
    help="Checkpoints of a command of your own. Example: out/step_{step}.",
)
@click.option(
    "--out",
    default="autotune-guard",
    show_default=True,
    type=click.Path(),
    help="Folder of guard.json and the changed configurations.",
)
@as_json_option("Print guard.json on stdout, after the output of COMMAND.")
@click.pass_context
def command(
    context: click.Context,
    /,
    config: str | None,
    no_proof: bool,
    restarts: int,
    may_change: tuple[str, ...],
    early: bool,
    end_hangs: bool,
    resume: bool,
    values: tuple[str, ...],
    checkpoints: str | None,
    out: str,
    as_json: bool,
    **flags: Any,
) -> int:
    """Prove that CONFIG fits, start COMMAND, and watch it. If memory runs out, choose the next
    configuration that learns the same, and start again from the last whole checkpoint. If a GPU or
    a node fails, start again unchanged. CONFIG is a file of `trl --config`, or the launch script of
    another framework; without it, COMMAND is read itself.

    COMMAND keeps its streams, and receives signals. Exit codes: COMMAND's own, 128 and the number
    for a signal; 3 if memory ran out and nothing that learns the same fits. Before COMMAND starts:
    2 bad input, 3 it doesn't fit, 4 the training environment can't be used, 5 undecided.

    \b
    Examples:
      autotune guard train.yaml -- trl grpo --config train.yaml
      autotune guard train.yaml --resume -- trl grpo --config train.yaml
      autotune guard --values micro=8,4,2 -- python train.py --micro {micro}

    """
    from autotune.guard.command_reading import check_learning
    from autotune.guard.history import last_run
    from autotune.guard.watch import GuardOptions
    from autotune.report.output_folder import check_folder

    command_words = tuple(context.meta.get(COMMAND_KEY, ()))
    _check(config, command_words)
    check_folder(Path(out))
    options = GuardOptions(
        out=Path(out),
        restarts=restarts,
        early=early,
        end_hangs=end_hangs,
        may_change=frozenset(may_change),
    )
    request = Flags(config=None, **flags)
    with interruptible():
        training = _training(config, command_words, request, values, checkpoints, options.out)
        check_learning(training, options.may_change)
        earlier = last_run(options.out, config) if resume else None
        proof = None
        if not no_proof:
            proof = _proof(training, config, request, earlier)
    if proof is not None and proof.use is None:
        return EXIT_CODES[proof.status]
    guarded = _guard(training, options, config, proof, earlier)
    if as_json:
        print(json.dumps(guarded.history.document(), default=str), flush=True)
    return _exit_code(guarded)


def _check(config: str | None, command_words: Sequence[str]) -> None:
    """Refuse a missing command, before anything is proven."""
    if not command_words:
        raise BadInput(
            "No command was given.",
            way_out="Write it behind two dashes: -- trl grpo --config train.yaml",
        )
    if config is not None:
        check_command(config, command_words)
        if not any(names(word, config) or VARIABLE in word for word in command_words):
            raise BadInput(
                f"COMMAND does not name {config}, so a changed file would not reach it.",
                way_out=f'Write -- trl grpo --config {config}, or read "${VARIABLE}" in a shell.',
            )
    elif shutil.which(command_words[0]) is None:
        raise BadInput(
            f"COMMAND {command_words[0]!r} is no program.",
            way_out="Write what starts the training behind the two dashes.",
        )


def _training(
    config: str | None,
    command_words: tuple[str, ...],
    request: Flags,
    values: Sequence[str],
    checkpoints: str | None,
    out: Path,
) -> Training:
    """Return what is guarded: a training that autotune reads, or the command as it is."""
    from autotune.guard.command_reading import known_training
    from autotune.guard.own_training import CHECKPOINT, OwnTraining, check_pattern, ladder_of

    check_pattern(checkpoints)
    ladder = ladder_of(values, command_words)
    is_own = bool(ladder or checkpoints) or any(CHECKPOINT in word for word in command_words)
    if not is_own:
        training = known_training(config, command_words, request, out)
        if training is not None:
            return training
    return OwnTraining(
        command_words=command_words,
        ladder=ladder,
        pattern=checkpoints,
    )


def _proof(
    training: Training,
    config: str | None,
    request: Flags,
    earlier: Mapping[str, Any] | None,
) -> Preflight | None:
    """Prove that the configuration fits; None for what no preflight can prove."""
    from autotune.guard.command_reading import can_be_proven, is_changed, overriding_flags
    from autotune.preflight.check import preflight_flags

    if config is None or not can_be_proven(training):
        say("autotune guard: not proven: only files of `trl grpo --config` can be.", sys.stderr)
        return None
    if earlier is not None and is_changed(earlier):
        # The file itself ran out of memory, and the run goes on with another configuration.
        say(f"autotune guard: not proven: goes on with the changes to {config}.", sys.stderr)
        return None
    with PreflightDisplay(to_stderr=True) as terminal:
        stated = request.replace(config=config, set=overriding_flags(training))
        result = preflight_flags(stated, listener=terminal)
    say(result_text(result), sys.stderr)
    return result


def _guard(
    training: Training,
    options: GuardOptions,
    config: str | None,
    proof: Preflight | None,
    earlier: Mapping[str, Any] | None,
) -> Guarded:
    from autotune.guard.command_reading import resumed
    from autotune.guard.guarding import RunGuard
    from autotune.guard.history import History, attempts_in

    since = time.time()
    checkpoint = None
    if earlier is not None:
        training, checkpoint, since = resumed(training, earlier)
    history = History(
        out=options.out,
        config=config,
        proof=None if proof is None else proof.document,
        earlier=() if earlier is None else attempts_in(earlier),
    )
    guard = RunGuard(
        training=training,
        options=options,
        history=history,
        say=lambda text: say(text, sys.stderr),
        since=since,
    )
    return guard.run(checkpoint)


def _exit_code(guarded: Guarded) -> int:
    if guarded.nothing_fits:
        return NOTHING_FITS
    code = guarded.ending.end.shell_code
    if code == 0 and guarded.ending.reason != "finished":
        return FAULT  # it saved and stopped before the end, and was not started again
    return code
