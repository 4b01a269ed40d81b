"""Memory ran out: what failed, and the next smaller configuration, as files beside the checkpoints.

Neutral changes come first; one that changes what is learned is written only where nothing else is left, and says so first.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.candidate import Candidate
from autotune.diagnose import Diagnosis, as_document, diagnose_lines
from autotune.diagnose.advising import advice_for
from autotune.diagnose.changes import Change, changes_of
from autotune.diagnose.words import in_words
from autotune.files import put_whole
from autotune.integrations.gauges import Reading
from autotune.integrations.running import Running
from autotune.trainers.trl_files import with_changes

FOLDER = "out-of-memory"
NEXT = "next.yaml"
WIDTH = 120

LAST_RESORT = ("activations", "unknown_memory")
"""What helps against these helps where the cause's own remedies are used up."""


@dataclass(frozen=True, kw_only=True)
class Next:
    """The next smaller configuration."""

    change: Change
    learning: bool
    """Whether it changes what is learned."""

    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where the run was."""

    rank: int
    world_size: int
    step: int
    reading: Reading | None


def diagnosis_of(error: BaseException) -> Diagnosis:
    """By the same table as any log."""
    return diagnose_lines("".join(traceback.format_exception(error)).splitlines())


def next_smaller(running: Running, diagnosis: Diagnosis) -> Next | None:
    """The first change that the advice comes to and the framework accepts; those that leave what is learned alone come first."""
    legal = [found for change in _changes(running, diagnosis) if (found := _with(running, change)) is not None]
    return min(legal, key=lambda one: one.learning, default=None)


def _changes(running: Running, diagnosis: Diagnosis) -> Iterator[Change]:
    others = (dataclasses.replace(diagnosis, cause=cause, row=None) for cause in LAST_RESORT)
    advice = itertools.chain(diagnosis.remedies, *(advice_for(other) for other in others))
    return itertools.chain.from_iterable(changes_of(one, running.space, running.candidate) for one in advice)


def _with(running: Running, change: Change) -> Next | None:
    space, candidate = running.space, running.candidate
    other = running.trainer.complete(space.with_remedies({**candidate.knobs, **change}), running.job)
    if other == candidate or running.trainer.why_illegal(other, running.job) is not None:
        return None
    return Next(change=change, learning=space.is_learning(change, candidate.settings), candidate=other)


def write(folder: Path, error: BaseException, diagnosis: Diagnosis, moment: Moment, running: Running | None) -> tuple[Path, ...]:
    """Each rank that fails has files of its own. The configuration is the same whoever writes it, and is replaced as a whole: the
    first rank may not be the one that failed, and its launcher may end it before it noticed."""
    following = None if running is None else next_smaller(running, diagnosis)
    folder.mkdir(parents=True, exist_ok=True)
    document, words = folder / f"rank{moment.rank}.json", folder / f"rank{moment.rank}.txt"
    put_whole(document, (json.dumps(_document(error, diagnosis, moment, following), indent=2, default=str) + "\n").encode())
    put_whole(words, (_words(diagnosis, moment, following) + "\n\n" + "".join(traceback.format_exception(error))).encode())
    if running is None or following is None:
        return document, words
    put_whole(folder / NEXT, (_configuration(running, following, moment)).encode())
    return document, words, folder / NEXT


def _document(error: BaseException, diagnosis: Diagnosis, moment: Moment, following: Next | None) -> dict[str, Any]:
    return {
        **as_document(diagnosis),
        "error": {"type": type(error).__name__, "text": str(error)},
        **{name: getattr(moment, name) for name in ("rank", "world_size", "step")},
        "memory": None if moment.reading is None else dataclasses.asdict(moment.reading),
        "next": None
        if following is None
        else {"change": dict(following.change), "changes_what_is_learned": following.learning, "file": NEXT},
    }


def _words(diagnosis: Diagnosis, moment: Moment, following: Next | None) -> str:
    said = [f"Rank {moment.rank} of {moment.world_size}, after step {moment.step}.", in_words(diagnosis, WIDTH)]
    if following is not None:
        said.append(f"Next smaller configuration, in {NEXT}: {_assignments(following.change)}. {_what_it_means(following)}")
    return "\n".join(said)


def _configuration(running: Running, following: Next, moment: Moment) -> str:
    before = {name: running.candidate.settings.get(name) for name in following.change}
    notes = [
        _what_it_means(following),
        f"Memory ran out after step {moment.step}. Changed: {_assignments(following.change)} (before: {_assignments(before)}).",
        f"Nothing was measured: autotune preflight {NEXT} --dry-run proves that it fits.",
        f"As flags: {' '.join(f'--{name} {_text(value)}' for name, value in following.change.items())}",
        f"In Python: {', '.join(f'{name}={value!r}' for name, value in following.change.items())}",
    ]
    if not running.from_file:
        notes.append("The run was not started from a file: its data, rewards and model stay where they are, in the script.")
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump(with_changes(following.candidate, running.job), sort_keys=False, allow_unicode=True)


def _what_it_means(following: Next) -> str:
    return "CHANGES WHAT IS LEARNED: nothing else was left." if following.learning else "What is learned stays the same."


def _assignments(change: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in change.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
