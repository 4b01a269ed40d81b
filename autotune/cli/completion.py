"""`autotune completion`: what a shell must be told to complete commands, flags and their values."""

from __future__ import annotations

import click

_VARIABLE = "_AUTOTUNE_COMPLETE"
"""By it the shell asks, and click answers before any command runs."""

_WHERE = {
    "bash": "~/.local/share/bash-completion/completions/autotune",
    "zsh": "a file `_autotune` in a folder of your $fpath",
    "fish": "~/.config/fish/completions/autotune.fish",
}


@click.command(name="completion", short_help="print what makes a shell complete autotune's words")
@click.argument("shell", type=click.Choice(list(_WHERE)))
def command(shell: str) -> None:
    """Print the lines that make SHELL complete autotune's commands, flags and values.

    \b
    Examples:
      autotune completion bash > ~/.local/share/bash-completion/completions/autotune
      autotune completion zsh > ~/.zfunc/_autotune        # a folder of your $fpath
      autotune completion fish > ~/.config/fish/completions/autotune.fish
    """
    from click.shell_completion import get_completion_class

    from autotune.cli import autotune_command

    kind = get_completion_class(shell)
    assert kind is not None
    # Without source_vars, click would start bash to look at its version, which may be none here.
    made = kind(autotune_command, {}, "autotune", _VARIABLE)
    print(made.source_template % made.source_vars())
