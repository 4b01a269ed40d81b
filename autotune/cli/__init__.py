"""The commands. Exit codes live here and nowhere else; each command is a file, loaded only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

import autotune
from autotune.cli.exits import FAULT, report_and_exit_code
from autotune.cli.words import Context

_COMMANDS = {
    "run": "measure candidates on this machine and recommend the fastest that fits",
    "predict": "say without a GPU whether a configuration fits, by how much, and what takes the memory",
    "preflight": "prove that a configuration fits here, then start the run",
    "diagnose": "say from a training log what failed first, and what helps",
    "report": "make the HTML page of an answer",
    "dashboard": "look at a study in optuna-dashboard, with the memory limit respected",
    "study": "move a study: export it into a file, import it again",
    "completion": "print what makes a shell complete these words",
    "show": "list the models, GPUs, spaces and knobs that are known",
}
"""Name and summary of each command, so that --help needs none of them."""


class _Lazy(click.Group):
    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"autotune.cli.{cmd_name}").command
        return _in_our_words(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def _in_our_words(command: click.Command) -> click.Command:
    """Help that stays within the terminal, of the command and of those below it."""
    command.context_class = Context
    for below in getattr(command, "commands", {}).values():
        # click shortens what it takes from the help itself; a sentence is worth its lines.
        below.short_help = below.short_help or " ".join((below.help or "").split("\n\n")[0].split())
        _in_our_words(below)
    return command


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autotune.__version__, "-V", "--version", message="autotune %(version)s")
def autotune_command() -> None:
    """Before a GRPO run: will it fit, and what is the fastest setting that fits?

    \b
    Example:
      autotune run --model Qwen2.5-0.5B --gpus local --budget 20m
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the program `autotune`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = autotune_command.main(args=given, prog_name="autotune", standalone_mode=False)
    except BaseException as error:  # every way out of the program is decided in one place
        sys.exit(report_and_exit_code(error, as_json="--json" in given))
    sys.exit(result if isinstance(result, int) else 0 if result is None else FAULT)
