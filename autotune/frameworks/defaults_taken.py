"""Defaults that stand in for settings whose value a launch or a file does not give."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.space import setting_text


@dataclass(frozen=True, kw_only=True)
class DefaultTaken:
    """Setting with its framework's default, and why."""

    name: str
    value: object  # None: the framework has no plain default
    reason: str  # follows the setting in the sentence, with the sign before it
    is_of_newest: bool = False  # True: not said where the author's release has a default

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name}{self.reason}"
        return self.sentence_with(self.value)

    def sentence_with(self, value: object) -> str:
        """Return the sentence with the default of another release."""
        return f"{self.name}={setting_text(value)}{self.reason}"
