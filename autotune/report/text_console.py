"""What the texts of a prediction need of a console. rich's serves, and so does a lighter one."""

from __future__ import annotations

from typing import Protocol


class TextConsole(Protocol):
    """Console of plain lines."""

    soft_wrap: bool  # lines are left as long as they are

    @property
    def width(self) -> int: ...

    def print(self, text: str = "", /, *, soft_wrap: bool | None = None) -> None:
        """Print a text; with `soft_wrap` without breaks of its lines."""
