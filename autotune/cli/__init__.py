"""Command line. Each command is one module, imported when it is called."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO, cast

import click

import autotune
from autotune.cli.exit_codes import DONE, FAULT, INTERRUPTED, report_and_exit_code
from autotune.cli.output import Context
from autotune.core.errors import BadInput
from autotune.core.files import printable
from autotune.machine.signals import exit_handlers_are_skipped, ignore_stop_signals, stop_requested

_COMMANDS = {
    "run": "measure candidates on this machine and recommend the fastest that fits",
    "predict": "predict without a GPU whether a configuration fits, with the parts of its memory",
    "solve": "predict the largest value of a setting, or the cheapest GPUs, that fit",
    "rehearse": "run a training command on emulated GPUs: its peaks, or its error",
    "preflight": "prove that a configuration fits here, then start the run",
    "guard": "start a training, watch it, and start it again where memory ran out",
    "diagnose": "find the first failure in a training log, with remedies",
    "report": "write the HTML page of an answer",
    "dashboard": "show a study in optuna-dashboard, with the memory limit respected",
    "study": "export a study into a file, or import it",
    "completion": "print the shell completion script",
    "show": "list the known models, GPUs, search spaces and knobs",
}
"""Command -> summary; --help imports no command."""

OBJECTS_BETWEEN_COLLECTIONS = 200_000


class _LazyGroup(click.Group):
    """Group whose commands are imported when they are called."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"autotune.cli.{cmd_name}").command
        return _with_context(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _with_context(command: click.Command) -> click.Command:
    """Make help of the command and its subcommands as wide as the terminal."""
    command.context_class = Context
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            if not subcommand.short_help:  # click would truncate a summary taken from the help
                summary = (subcommand.help or "").split("\n\n")[0]
                subcommand.short_help = " ".join(summary.split())
            _with_context(subcommand)
    return command


@click.command(
    cls=_LazyGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(autotune.__version__, "-V", "--version", message="autotune %(version)s")
@click.pass_context
def autotune_command(context: click.Context) -> None:
    """Before a GRPO run: does it fit, and which setting that fits is the fastest?

    \b
    Example:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program `autotune`."""
    # An answer allocates much and drops few cycles: the collector took a tenth of its time.
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    # A character that the terminal's encoding lacks is shown as `?`: the answer counts.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, PipeOutput(sys.stdout))
    try:
        for word in command_line:
            _refuse_other_encoding(word)
        result = autotune_command.main(
            args=command_line,
            prog_name="autotune",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except BaseException as error:  # all exit codes are decided in one place
        ignore_stop_signals()  # a second Ctrl-C must not interrupt the report
        _end(report_and_exit_code(error, as_json="--json" in command_line))
    if result is None:
        result = DONE
    _end(result if isinstance(result, int) else FAULT)


def _open_closed_streams() -> None:
    """Let a standard stream that the caller closed (`>&-`) lead nowhere. Otherwise the next file
    that is opened takes its number, and what is printed goes there.
    """
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(modes.items()):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            stream = os.fdopen(number, mode)
            setattr(sys, name, stream)


def _refuse_other_encoding(word: str) -> None:
    """Refuse an argument that is not UTF-8: it can be in no written file."""
    if any("\ud800" <= character <= "\udfff" for character in word):
        raise BadInput(
            f"The argument '{printable(word)}' is not UTF-8 text.",
            way_out="Rename that file or folder.",
        )


def _end(code: int) -> NoReturn:
    """Exit. After an interruption at once: the interpreter's own end takes seconds on a busy
    machine, in which the deadline's thread does not run any more and a second Ctrl-C would
    decide the exit code.
    """
    if exit_handlers_are_skipped() or stop_requested() or code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # The interpreter's last search for cycles would take a tenth of an answer. It closes databases,
    # which a command without a study never opened.
    if "sqlalchemy" not in sys.modules:
        gc.freeze()
    sys.exit(code)


class PipeOutput:
    """Text stream that discards its output once its reader is gone. The command goes on and keeps
    its exit code.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        # The stream keeps its unwritten text, which goes to the null device with its next flush.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, self._stream.fileno())
        os.close(null_device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
