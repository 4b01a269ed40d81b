"""Settings of a launch script without a value, because a variable of the shell is not set.

bash replaces such a variable by nothing. A framework then stops, or takes the words behind it for
the value. Here the variable is named, with the ways to give it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.errors import BadInput
from autotune.core.shell.variable_values import UNKNOWN
from autotune.core.user_script import StatedSetting
from autotune.frameworks.base import Field


def lacks_value(stated: StatedSetting, field: Field | None) -> bool:
    """Return True if an unset variable leaves the value empty, or a number incomplete."""
    if not stated.unset:
        return False
    if stated.text is None:
        return field is None or "bool" not in field.kinds or "str" in field.kinds
    text = stated.text.strip()
    return not text or UNKNOWN in text or text.lstrip("-").isdecimal()


def without_value(
    path: str,
    name: str,
    stated: StatedSetting,
) -> BadInput:
    """Return the error about a setting that needs a variable."""
    not_set = f" Not set: {variables(stated)}." if stated.unset else ""
    return BadInput(
        f"{path}, line {stated.line}: {name} has no value.{not_set}",
        way_out=f"Give it: {ways_to_give(name, stated)}.",
    )


def variables(stated: StatedSetting) -> str:
    """Return the unset variables in words; arguments of the script have numbers."""
    return in_words(stated.unset)


def in_words(unset: Sequence[str]) -> str:
    """Return variables without a value in words."""
    names = []
    for name in unset:
        if name.isdecimal():
            names.append(f"argument {name}")
        else:
            names.append(f"${name}")
    return " and ".join(names)


def ways_to_give(name: str, stated: StatedSetting) -> str:
    """Return the ways to give the value: the variable, and the setting itself."""
    return f"{ways_to_set(stated.unset)}, or --hold {name}=VALUE"


def ways_to_set(unset: Sequence[str]) -> str:
    """Return the way to give variables or arguments that are not set."""
    names = [name for name in unset if not name.isdecimal()]
    if not names:
        return "the script's arguments behind --"
    assignments = " ".join(f"{variable}=VALUE" for variable in names)
    return f"{assignments} autotune ..."
