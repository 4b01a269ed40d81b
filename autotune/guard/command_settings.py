"""Settings in the words of a command: read, changed, and the words as a script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from autotune.core.space import KnobValue, setting_text
from autotune.request.assignments import parse_value


def with_settings(command_words: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Return the command with the changed settings also where its own flags state them."""
    changed: list[str] = []
    pending: object = None
    for word in command_words:
        name, equals, _ = word.lstrip("-").partition("=")
        if pending is not None:
            changed.append(setting_text(pending))
            pending = None
        elif word.startswith("--") and name.replace("-", "_") in settings:
            value = settings[name.replace("-", "_")]
            changed.append(f"--{name}={setting_text(value)}" if equals else word)
            pending = None if equals else value
        else:
            changed.append(word)
    return changed


def with_flags(command_words: Sequence[str], settings: Mapping[str, KnobValue]) -> list[str]:
    """Return the command with these settings as flags, in their place or at the end."""
    changed = with_settings(command_words, settings)
    stated = settings_of_flags(command_words)
    for name, value in settings.items():
        if name not in stated:
            text = setting_text(value)
            changed.append(f"--{name}={text}")
    return changed


def settings_of_flags(command_words: Sequence[str]) -> dict[str, KnobValue]:
    """Return the settings that flags of a command state, each with one value."""
    settings: dict[str, KnobValue] = {}
    for word, following in pairwise((*command_words, "--")):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            continue
        if not equals:
            value = "true" if following.startswith("--") else following
        settings[flag.lstrip("-").replace("-", "_")] = parse_value(value)
    return settings


def as_script(command_words: Sequence[str]) -> str:
    """Return a command as a shell script."""
    return f"{shlex.join(command_words)}\n"
