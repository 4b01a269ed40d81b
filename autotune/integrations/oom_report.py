"""Out-of-memory report: diagnosis and the next smaller configuration, as files next to the checkpoints.

Neutral changes come first. A change of what is learned is the last resort and is marked as such.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.core.files import write_atomically
from autotune.core.space import Candidate
from autotune.diagnosis import Diagnosis, as_document, diagnose_lines
from autotune.diagnosis.diagnosis import in_words
from autotune.diagnosis.remedies import Change, advice_for, changes_of
from autotune.frameworks.trl.output_files import with_changes
from autotune.integrations.memory_gauges import GaugeReading
from autotune.integrations.running_trainer import Running

FOLDER = "out-of-memory"
NEXT = "next.yaml"
WIDTH = 120

LAST_RESORT = ("activations", "unknown_memory")  # causes whose remedies are tried when those of the diagnosed cause are exhausted


@dataclass(frozen=True, kw_only=True)
class Next:
    """Next smaller configuration."""

    change: Change
    learning: bool  # changes what is learned
    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class OomMoment:
    """State of the run when memory ran out."""

    rank: int
    world_size: int
    step: int
    reading: GaugeReading | None


def diagnosis_of(error: BaseException) -> Diagnosis:
    """Diagnose an exception by the failure table, like any log."""
    return diagnose_lines("".join(traceback.format_exception(error)).splitlines())


def next_smaller(running: Running, diagnosis: Diagnosis) -> Next | None:
    """Return the first change from the advice that the framework accepts; neutral changes first."""
    others = (dataclasses.replace(diagnosis, cause=cause, row=None) for cause in LAST_RESORT)
    advice = itertools.chain(diagnosis.remedies, *(advice_for(other) for other in others))
    trainer, task, space, candidate = running.trainer, running.task, running.space, running.candidate
    legal = []
    for change in itertools.chain.from_iterable(changes_of(one, space, candidate) for one in advice):
        other = trainer.complete(space.with_remedies({**candidate.knobs, **change}), task)
        if other != candidate and trainer.why_illegal(other, task) is None:
            legal.append(Next(change=change, learning=space.is_learning(change, candidate.settings), candidate=other))
    return min(legal, key=lambda one: one.learning, default=None)


def write(
    folder: Path, error: BaseException, diagnosis: Diagnosis, moment: OomMoment, running: Running | None
) -> tuple[Path, ...]:
    """Write the report of one failing rank.

    Each rank has its own files. The next configuration is the same on all ranks and is replaced
    atomically: rank 0 may not be the failing one, and its launcher may terminate it first.
    """
    following = None if running is None else next_smaller(running, diagnosis)
    folder.mkdir(parents=True, exist_ok=True)
    document, words = folder / f"rank{moment.rank}.json", folder / f"rank{moment.rank}.txt"
    report: dict[str, Any] = {
        **as_document(diagnosis),
        "error": {"type": type(error).__name__, "text": str(error)},
        **{name: getattr(moment, name) for name in ("rank", "world_size", "step")},
        "memory": None if moment.reading is None else dataclasses.asdict(moment.reading),
        "next": None,
    }
    if following is not None:
        report["next"] = {"change": dict(following.change), "changes_what_is_learned": following.learning, "file": NEXT}
    write_atomically(document, f"{json.dumps(report, indent=2, default=str)}\n".encode())
    lines = [f"Rank {moment.rank} of {moment.world_size}, after step {moment.step}.", in_words(diagnosis, WIDTH)]
    if following is not None:
        lines.append(f"Next smaller configuration, in {NEXT}: {_assignments(following.change)}. {_effect_text(following)}")
    lines += ["", "".join(traceback.format_exception(error))]
    write_atomically(words, "\n".join(lines).encode())
    if running is None or following is None:
        return document, words
    write_atomically(folder / NEXT, _configuration(running, following, moment).encode())
    return document, words, folder / NEXT


def _configuration(running: Running, following: Next, moment: OomMoment) -> str:
    before = {name: running.candidate.settings.get(name) for name in following.change}
    notes = [
        _effect_text(following),
        f"Memory ran out after step {moment.step}. Changed: {_assignments(following.change)} (before: {_assignments(before)}).",
        f"Nothing was measured: autotune preflight {NEXT} --dry-run proves that it fits.",
        f"As flags: {' '.join(f'--{name} {_text(value)}' for name, value in following.change.items())}",
        f"In Python: {', '.join(f'{name}={value!r}' for name, value in following.change.items())}",
    ]
    if not running.from_file:
        notes.append("The run was not started from a file: its data, rewards and model stay where they are, in the script.")
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump(with_changes(following.candidate, running.task), sort_keys=False, allow_unicode=True)


def _effect_text(following: Next) -> str:
    return "CHANGES WHAT IS LEARNED: nothing else was left." if following.learning else "What is learned stays the same."


def _assignments(change: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in change.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
