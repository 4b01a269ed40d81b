"""The user's launch script with changed settings, and the difference as a patch."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.core.space import KnobValue
from autotune.core.user_script import LaunchScript, StatedSetting
from autotune.frameworks.base import as_word
from autotune.frameworks.settings_table import Field

Edit = tuple[int, int, str]
"""Start, end and new text of a place in the script."""


def changed_script(launch: LaunchScript, changes: Mapping[str, KnobValue], more: Sequence[Edit] = ()) -> str:
    """Return the text with each change at the place of its setting, or at the command's end."""
    edits: list[Edit] = [*more]
    added: list[str] = []
    for name, value in changes.items():
        stated = launch.stated.get(name)
        edit = None if stated is None else _edit(launch, name, stated, value)
        if edit is not None:
            edits.append(edit)
        elif word := _words(launch, name, value, stated):
            added.append(word)
    if added:
        edits.append((launch.end, launch.end, "".join(f" \\\n    {one}" for one in added)))
    text = launch.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def difference(launch: LaunchScript, changed: str) -> str:
    """Return a unified diff against the user's script."""
    return unified_diff(launch.text, changed, Path(launch.path).name)


def unified_diff(before: str, after: str, name: str) -> str:
    """Return a diff for `patch -p1`; empty without a change."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _edit(launch: LaunchScript, name: str, stated: StatedSetting, value: KnobValue) -> tuple[int, int, str] | None:
    """Return (start, end, text); None where the setting is not one word of the file."""
    if launch.dotted:
        return None if stated.span is None else (*stated.span, _words(launch, name, value, stated))
    if stated.text is None and stated.option is not None and value is False:
        return (*stated.option, "")
    if stated.span is not None:
        return (*stated.span, shlex.quote(as_word(value)))
    if stated.option is not None and stated.text is not None and launch.text[slice(*stated.option)].find("=") > 0:
        return (*stated.option, f"--{launch.former.get(name, name)}={shlex.quote(as_word(value))}")
    return None


def _words(launch: LaunchScript, name: str, value: KnobValue, stated: StatedSetting | None) -> str:
    if launch.dotted:
        return f"{stated.prefix if stated else ''}{name}={shlex.quote(as_word(value))}"
    if launch.in_files:
        flag = name.replace("_", "-")
        return f"--{flag}" if value is True else f"--no-{flag}" if value is False else f"--{flag} {shlex.quote(as_word(value))}"
    name = launch.former.get(name, name)
    if launch.framework == "openrlhf" and isinstance(value, bool):
        return f"--{name}" if value else ""
    return f"--{name} {shlex.quote(as_word(value))}"


def changes_of(
    stated: Mapping[str, object], defaults: Mapping[str, object], knobs: Mapping[str, KnobValue], known: Mapping[str, Field]
) -> dict[str, KnobValue]:
    """Return the knobs with another value than the launch has, stated in it, in its file or by default."""
    return {
        name: value
        for name, value in knobs.items()
        if value is not None and name in known and stated.get(name, defaults.get(name, known[name].default)) != value
    }
