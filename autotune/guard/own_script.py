"""Restart of the user's own TRL script: flags of its command change the settings, where a parser of
TRL reads them; a checkpoint reaches `train` only if the script passes it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.core.job import Task
from autotune.core.space import Candidate, KnobValue
from autotune.core.user_script import UserScript
from autotune.frameworks.trl.script_files import advice_for
from autotune.preflight.command_words import names

RESUME = "resume_from_checkpoint"


def flags_of(
    candidate: Candidate, task: Task, script: UserScript
) -> Mapping[str, KnobValue] | None:
    """Return the flags that turn the script into the candidate; None where flags cannot."""
    advice = advice_for(candidate, task, script)
    if advice.changes and not script.takes_flags:
        return None
    return None if advice.in_objects else advice.changes


def is_in(command_words: Sequence[str], script: UserScript) -> bool:
    """Return True if the command itself starts the script, so that flags reach it."""
    return any(names(word, script.path) for word in command_words)


def takes_checkpoint(script: UserScript) -> bool:
    """Return True if the script passes the checkpoint of its settings to `train`."""
    place = script.look.train_place
    if place is None or not script.takes_flags:
        return False
    first = place.line
    last = place.line
    if place.span is not None:
        first = place.span[0]
        last = place.span[1]
    lines = Path(place.file).read_text().splitlines()
    call = lines[first - 1 : last]
    return any(RESUME in line for line in call)


def limits_of(command_words: Sequence[str], script: UserScript) -> str:
    """Return what a restart of the script does not continue; empty: nothing."""
    if not is_in(command_words, script):
        return f"flags do not reach {script.path}: a restart begins at step 0, unchanged"
    if not script.takes_flags:
        return f"{script.path} takes no flags of TRL: a restart begins at step 0, unchanged"
    if not takes_checkpoint(script):
        call = f"train({RESUME}=args.{RESUME})"
        return f"{script.path} does not call {call}: a restart begins at step 0"
    return ""
