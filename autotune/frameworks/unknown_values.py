"""Settings of a launch script whose value only a run of the script has, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.shell.unknown_texts import UnknownText


def why_not_known(unknown: Sequence[UnknownText]) -> str:
    """Return what follows `NAME has` in a sentence about a value that is not known."""
    named = " and ".join(map(str, unknown))
    if not unknown or all(text.is_output for text in unknown):
        what = "the output of a command, which is not run"
    elif not all(text.is_certain for text in unknown):
        what = "a value that a line gives it which a run may reach or not"
    else:
        what = "a value that only a run of the script has"
    return f"{what}: {named}" if named else what


def ways_to_state(
    name: str,
    unknown: Sequence[UnknownText],
    *,
    flag: str = "--hold",
) -> str:
    """Return the ways to give a setting: variables that have a default, and the setting itself."""
    setting = f"{flag} {name}=VALUE"
    variables = variables_with_default(unknown)
    return f"{variables} autotune ..., or {setting}" if variables else setting


def variables_with_default(unknown: Sequence[UnknownText]) -> str:
    """Return the assignments in front of the command that make a value known; empty: others are
    needed as well.
    """
    if not unknown or not all(text.is_default for text in unknown):
        return ""
    return " ".join(f"{text.variable}=VALUE" for text in unknown)
