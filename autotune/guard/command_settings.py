"""Settings in the words of a command: read, changed, and the words as a script.

--beta 0.1    --beta=0.1    --bf16    --no_gradient_checkpointing
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.core.space import KnobValue, setting_text
from autotune.request.assignments import parse_value

FLAG_SIGN = "--"
NEGATION = "no_"  # before the name of a switch that is on by default


@dataclass(frozen=True, kw_only=True)
class CommandPart:
    """A flag of a command with the words up to the next flag."""

    arguments: tuple[str, ...]
    setting: str = ""  # that the flag states; empty: no flag
    value_text: str = ""

    def with_value(self, value: object) -> tuple[str, ...]:
        """Return the words with another value, written as before where there was one."""
        text = setting_text(value)
        flag, equals, _ = self.arguments[0].partition("=")
        if equals:
            return (f"{flag}={text}", *self.arguments[1:])
        if len(self.arguments) > 1:
            return (flag, text, *self.arguments[2:])
        return (f"{FLAG_SIGN}{self.setting}={text}",)


def parts_of(command_words: Sequence[str]) -> list[CommandPart]:
    """Split a command before each flag. The first part is the program, with its arguments."""
    parts: list[CommandPart] = []
    arguments: list[str] = []
    for word in command_words:
        if word.startswith(FLAG_SIGN):
            parts.append(_part(arguments))
            arguments = []
        arguments.append(word)
    parts.append(_part(arguments))
    return parts


def _part(arguments: Sequence[str]) -> CommandPart:
    # 1. What is no flag.
    first_word = arguments[0] if arguments else ""
    flag, equals, value_text = first_word.partition("=")
    setting = flag.removeprefix(FLAG_SIGN).replace("-", "_")
    if not flag.startswith(FLAG_SIGN) or not setting:
        return CommandPart(arguments=tuple(arguments))

    # 2. A flag with a value, or a switch.
    if not equals and len(arguments) > 1:
        value_text = arguments[1]
    elif not equals:
        value_text = setting_text(not setting.startswith(NEGATION))
        setting = setting.removeprefix(NEGATION)
    return CommandPart(
        arguments=tuple(arguments),
        setting=setting,
        value_text=value_text,
    )


def with_settings(command_words: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Return the command with the changed settings also where its own flags state them."""
    changed: list[str] = []
    for part in parts_of(command_words):
        arguments = part.arguments
        if part.setting in settings:
            arguments = part.with_value(settings[part.setting])
        changed += arguments
    return changed


def with_flags(command_words: Sequence[str], settings: Mapping[str, KnobValue]) -> list[str]:
    """Return the command with these settings as flags, in their place or at the end."""
    changed = with_settings(command_words, settings)
    stated = settings_of_flags(command_words)
    for name, value in settings.items():
        if name not in stated:
            text = setting_text(value)
            changed.append(f"{FLAG_SIGN}{name}={text}")
    return changed


def settings_of_flags(command_words: Sequence[str]) -> dict[str, KnobValue]:
    """Return the settings that flags of a command state; of several values the first."""
    settings: dict[str, KnobValue] = {}
    for part in parts_of(command_words):
        if part.setting:
            settings[part.setting] = parse_value(part.value_text)
    return settings


def as_script(command_words: Sequence[str]) -> str:
    """Return a command as a shell script."""
    return f"{shlex.join(command_words)}\n"
