"""`autotune completion`: shell completion of commands, flags and values."""

from __future__ import annotations

import click

_VARIABLE = "_AUTOTUNE_COMPLETE"
"""Variable by which a shell requests completions; click answers before any command runs."""

_INSTALL_PATHS = {
    "bash": "~/.local/share/bash-completion/completions/autotune",
    "zsh": "a file `_autotune` in a folder of your $fpath",
    "fish": "~/.config/fish/completions/autotune.fish",
}


@click.command(name="completion", short_help="print the shell completion script")
@click.argument("shell", type=click.Choice(list(_INSTALL_PATHS)))
def command(shell: str) -> None:
    """Print the completion script of autotune's commands, flags and values for SHELL.

    \b
    Examples:
      autotune completion bash > ~/.local/share/bash-completion/completions/autotune
      autotune completion zsh > ~/.zfunc/_autotune        # a folder of your $fpath
      autotune completion fish > ~/.config/fish/completions/autotune.fish
    """
    from click.shell_completion import get_completion_class

    from autotune.cli import autotune_command

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    completion = completion_class(autotune_command, {}, "autotune", _VARIABLE)
    # `completion.source()` would start bash, which may not be installed.
    print(completion.source_template % completion.source_vars())
