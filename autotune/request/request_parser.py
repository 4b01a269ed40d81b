"""Parsing of a request: the flags of any command become a job and its trainer."""

from __future__ import annotations

import itertools
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.frameworks.command import NAME
from autotune.request.command_job import EXAMPLE, parse_command_request
from autotune.request.flags import Flags, option_name
from autotune.request.job_builder import ParsedRequest, parse_framework_request

SHELLS = ("bash", "sh")
"""Programs whose command line names a launch script."""


def parse_request(flags: Flags) -> ParsedRequest:
    """Parse the flags of one request: about the user's own command, or about a known framework."""
    if flags.framework == NAME:
        return parse_command_request(flags)
    flags = _as_launch(flags)
    if flags.arguments and not flags.script and not flags.from_command:
        raise BadInput("A command of your own needs --framework command.", way_out=f"Write: {EXAMPLE}")
    for name in ("metrics", "speed_pattern", "learning"):
        if getattr(flags, name):
            raise BadInput(
                f"{option_name(name)} is about a command of your own: --framework command.", way_out=f"Write: {EXAMPLE}"
            )
    return parse_framework_request(flags)


def _as_launch(flags: Flags) -> Flags:
    """Return `-- bash run.sh WORDS` as `--from-command run.sh -- WORDS`."""
    shell, *words = flags.arguments or ("",)
    if Path(shell).name not in SHELLS or "-c" in words or flags.script or flags.from_command or flags.config:
        return flags
    words = words[sum(1 for _ in itertools.takewhile(lambda word: word.startswith("-"), words)) :]
    return flags.replace(from_command=words[0], arguments=tuple(words[1:])) if words else flags
