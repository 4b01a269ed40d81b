"""Codes of the uses of modules and parameters in a trace (`ModuleUse.uses`)."""

from __future__ import annotations

from enum import IntEnum


class UseKind(IntEnum):
    """Kind of a use; the tracing side writes its number."""

    PASS = 0  # a pass of the whole model begins; with the module that is its root
    FORWARD = 1  # a module's forward begins
    FORWARD_DONE = 2
    BACKWARD = 3  # a module's backward begins
    BACKWARD_DONE = 4
    GRADIENT = 5  # a parameter's gradient is ready; with its allocation
    READ = 6  # a parameter is read by a module that does not own it


ENDINGS = frozenset({UseKind.FORWARD_DONE, UseKind.BACKWARD_DONE, UseKind.GRADIENT})
"""Kinds that end something: they belong to the events before them, the others to those after."""
