"""Order of simplicity among candidates of equal speed (simplicity.yaml)."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from autotune.core.space import Candidate
from autotune.core.yaml_document import packaged_table


class Criterion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Settings that are compared together, each with its values, simplest first."""

    criterion: str
    why: str
    settings: dict[str, list[Any]]

    def rank(self, candidate: Candidate) -> int:
        """Return the sum of the positions of the candidate's values; 0: nothing but the simplest."""
        return sum(
            values.index(candidate.settings[name])
            for name, values in self.settings.items()
            if name in candidate.settings and candidate.settings[name] in values
        )


@functools.cache
def criteria() -> tuple[Criterion, ...]:
    """Return the criteria in their order."""
    return packaged_table("autotune.catalog", "simplicity.yaml", tuple[Criterion, ...])


def complexity(candidate: Candidate, baseline: Candidate | None = None) -> tuple[int, ...]:
    """Return the sort key of simplicity, lowest first: the criteria, then the number of knobs that differ from the baseline."""
    ranks = tuple(one.rank(candidate) for one in criteria())
    if baseline is None:
        return (*ranks, 0)
    names = {*candidate.knobs, *baseline.knobs}
    return (*ranks, sum(candidate.knobs.get(name) != baseline.knobs.get(name) for name in names))
