"""Settings of a launch script whose value only a run of the script has, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.shell.unknown_texts import UnknownText


def why_not_known(unknown: Sequence[UnknownText]) -> str:
    """Return what follows `NAME has` in a sentence about a value that is not known."""
    kind = "the output of a command, which is not run"
    if not unknown:
        return kind
    for text in unknown:
        if not text.is_certain:
            kind = "a value that a line gives it which a run may reach or not"
        elif not text.is_output:
            kind = "a value that only a run of the script has"
    return f"{kind}: {' and '.join(map(str, unknown))}"


def ways_to_state(
    name: str,
    unknown: Sequence[UnknownText],
    *,
    flag: str = "--hold",
) -> str:
    """Return the ways to give a setting: variables that have a default, and the setting itself."""
    setting = f"{flag} {name}=VALUE"
    variables = variables_with_default(unknown)
    if not variables:
        return setting
    return f"{variables} autotune ..., or {setting}"


def variables_with_default(unknown: Sequence[UnknownText]) -> str:
    """Return the assignments in front of the command that make a value known; empty: others are
    needed as well.
    """
    assignments: list[str] = []
    for text in unknown:
        if not text.is_default:
            return ""
        assignments.append(f"{text.variable}=VALUE")
    return " ".join(assignments)
