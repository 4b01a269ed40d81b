"""End of the process: at once where a library's exit handlers would crash it."""

from __future__ import annotations

_at_once = False


def skip_exit_handlers() -> None:
    """Let the command end without them: Ray's end in a segmentation fault without the head of their cluster."""
    global _at_once
    _at_once = True


def exit_handlers_are_skipped() -> bool:
    """Return True if the process must end at once."""
    return _at_once
