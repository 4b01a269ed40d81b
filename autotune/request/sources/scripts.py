"""Scripts of --from-command and --script -> UserFile."""

from __future__ import annotations

from pathlib import Path

from autotune.core.job import Hardware
from autotune.request.sources.launch_script import read_launch_script
from autotune.request.sources.launched_program import program_of, read_launched_program
from autotune.request.sources.reader import SourceReader
from autotune.request.sources.training_script import read_training_script
from autotune.request.values import FileChoice, UserFile

Inspection = tuple[Path, Hardware, str | None, bool]
"""Interpreter, GPUs, method if one is stated, and whether nothing is run there."""


def read_script(
    choice: FileChoice,
    reader: SourceReader,
    stated_by_flags: frozenset[str],
    inspection: Inspection,
) -> UserFile:
    """Read a launch script or a training script, once."""
    if choice.flag == "--script":
        return reader.once(read_training_script, choice, *inspection)
    program = reader.once(program_of, choice)
    if program is None:
        return reader.once(read_launch_script, choice, stated_by_flags)
    return reader.once(read_launched_program, program, *inspection)
