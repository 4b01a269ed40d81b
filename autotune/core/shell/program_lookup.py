"""Questions of a shell script whether a program is installed: `command -v`, `type`, `which`.

The machine that trains is another one than this. Programs without which no training starts there
are taken for installed, and those of its GPUs and launchers too, which is said. Of every other
program only a run knows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from autotune.core.shell.filters import TEXT_FILTERS
from autotune.core.shell.state import ShellState, Truth
from autotune.core.shell.variable_values import UNKNOWN

KEYWORDS = frozenset(
    "if then else elif fi case esac for select while until do done in function time { } ! [["
    " ]] coproc".split()
)
BUILTIN_NAMES = frozenset(
    ". : [ alias bg bind break builtin caller cd command compgen complete continue declare dirs"
    " disown echo enable eval exec exit export false fc fg getopts hash help history jobs kill"
    " let local logout mapfile popd printf pushd pwd read readarray readonly return set shift"
    " shopt source suspend test times trap true type typeset ulimit umask unalias unset"
    " wait".split()
)
ALWAYS_INSTALLED = frozenset(
    "bash sh cat cp mv rm mkdir ls env date nohup tee touch chmod sleep timeout xargs hostname"
    " python python3 pip pip3".split()
) | set(TEXT_FILTERS)
OF_A_TRAINING = frozenset("nvidia-smi torchrun accelerate deepspeed".split())
"""Programs that are taken for installed, which is said."""


def command_prints(
    shell: ShellState,
    names: Sequence[str],
    certain: bool,
) -> Truth:
    """`command -v NAME`: prints the name, which stands for the path of a program."""
    return _print_each(shell, names, certain, {*shell.functions, *BUILTIN_NAMES, *KEYWORDS})


def which_prints(
    shell: ShellState,
    names: Sequence[str],
    certain: bool,
) -> Truth:
    """`which NAME`, which knows programs only."""
    return _print_each(shell, names, certain, frozenset())


def type_prints(
    shell: ShellState,
    arguments: Sequence[str],
    certain: bool,
) -> Truth:
    """`type -t NAME` prints a word, and `type NAME` a sentence."""
    names = [argument for argument in arguments if not argument.startswith("-")]
    status: Truth = True
    for name in names:
        kind = _kind_of(shell, name)
        if kind and "-t" in arguments:
            shell.emit(f"{kind}\n")
        else:
            shell.emit(UNKNOWN)
        if not kind and not is_installed(shell, name, certain):
            status = None
    return status


def hash_knows(
    shell: ShellState,
    arguments: Sequence[str],
    certain: bool,
) -> Truth:
    """`hash NAME`."""
    names = [argument for argument in arguments if not argument.startswith("-")]
    for name in names:
        if name not in BUILTIN_NAMES and not is_installed(shell, name, certain):
            return None
    return True


def is_installed(
    shell: ShellState,
    name: str,
    certain: bool,
) -> bool:
    """Return True for a program that a training has; False: only a run knows."""
    if name in OF_A_TRAINING and certain:
        shell.note(f"line {shell.line_of_statement()}: {name} is installed where the training runs")
    return name in ALWAYS_INSTALLED or name in OF_A_TRAINING


def _print_each(
    shell: ShellState,
    names: Sequence[str],
    certain: bool,
    known_names: Set[str],
) -> Truth:
    status: Truth = True
    for name in names:
        if name in known_names or is_installed(shell, name, certain):
            shell.emit(f"{name}\n")
        else:
            shell.emit(UNKNOWN)
            status = None
    return status


def _kind_of(shell: ShellState, name: str) -> str:
    if name in KEYWORDS:
        return "keyword"
    if name in shell.functions:
        return "function"
    if name in BUILTIN_NAMES:
        return "builtin"
    return ""
