"""Call of a command that bash itself does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.core.shell.state import ShellState, Truth
from autotune.core.shell.variable_values import Word


@dataclass(frozen=True, kw_only=True)
class BuiltInCall:
    """Words of the command, its name first."""

    words: Sequence[Word]
    certain: bool
    settings: Mapping[str, str] = field(default_factory=dict)  # before it: `IFS=, read A`

    @property
    def name(self) -> str:
        return self.words[0].text

    @property
    def arguments(self) -> list[str]:
        return [word.text for word in self.words[1:]]


BuiltIn = Callable[[ShellState, BuiltInCall], Truth]
