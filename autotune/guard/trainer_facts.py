"""Facts that a trainer with `MemoryWatch` gives the guard: one file per rank, in the folder that
a variable of the command names.

    rank0-memory.json    phases and their peaks, rows of the forward pass, whether memory ran out

A command without `MemoryWatch` writes none: then phases are not known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from autotune.core.files import write_atomically
from autotune.guard.save_request import GUARD_VARIABLE

FACTS_OF_RANKS = "rank*-memory.json"


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """Rows of one forward pass."""

    rows: int
    tokens: int  # of each row, with its padding
    completion_tokens: int | None = None  # of them; None: rows without a completion

    @property
    def prompt_tokens(self) -> int | None:
        if self.completion_tokens is None:
            return None
        return self.tokens - self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class ShownFacts:
    """Facts of one rank, or of all ranks together."""

    phase_peak_bytes: Mapping[str, int]
    longest_row: int | None = None  # tokens of a forward pass's rows, likewise below
    longest_prompt: int | None = None
    longest_completion: int | None = None
    ran_out_in: str | None = None  # phase in which memory ran out
    ran_out_rows: TrainingRows | None = None  # of the forward pass before that

    def with_lengths(
        self,
        row: int | None,
        prompt: int | None,
        completion: int | None,
    ) -> ShownFacts:
        """Return the facts with these lengths where they are longer."""
        return replace(
            self,
            longest_row=longer_of(self.longest_row, row),
            longest_prompt=longer_of(self.longest_prompt, prompt),
            longest_completion=longer_of(self.longest_completion, completion),
        )


def write_facts(rank: int, facts: ShownFacts) -> None:
    """Give the guard of this process, if there is one, the facts of a rank."""
    folder = os.environ.get(GUARD_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomically(Path(folder) / f"rank{rank}-memory.json", msgspec.json.encode(facts))


def clear_facts(folder: Path) -> None:
    """Remove the facts of an earlier attempt."""
    for file in folder.glob(FACTS_OF_RANKS):
        with contextlib.suppress(OSError):
            file.unlink()


def read_facts(folder: Path) -> ShownFacts | None:
    """Return the facts of all ranks together; None: no trainer wrote any."""
    of_ranks = []
    for file in sorted(folder.glob(FACTS_OF_RANKS)):
        with contextlib.suppress(OSError, ValueError):
            of_ranks.append(msgspec.json.decode(file.read_bytes(), type=ShownFacts))
    if not of_ranks:
        return None
    return _together(of_ranks)


def _together(of_ranks: Sequence[ShownFacts]) -> ShownFacts:
    """Return the highest peaks, and how memory ran out on the first rank where it did."""
    peaks: dict[str, int] = {}
    together = ShownFacts(phase_peak_bytes=peaks)
    refused = together
    for facts in of_ranks:
        for phase, peak in facts.phase_peak_bytes.items():
            peaks[phase] = max(peak, peaks.get(phase, 0))
        together = together.with_lengths(
            facts.longest_row, facts.longest_prompt, facts.longest_completion
        )
        if refused.ran_out_in is None:
            refused = facts
    return replace(
        together,
        ran_out_in=refused.ran_out_in,
        ran_out_rows=refused.ran_out_rows,
    )


def longer_of(first: int | None, second: int | None) -> int | None:
    """Return the longer of two lengths, of which each may be unknown."""
    if first is None:
        return second
    if second is None:
        return first
    return max(first, second)
