"""Which parts of the search are in use: all of them, unless a benchmark asks what one of them is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Every part can be left out."""

    screen: bool = True
    """What cannot fit, by the corrected prediction, is not measured."""

    imply: bool = True
    """What ran out of memory settles everything that needs at least as much."""

    value_per_second: bool = True
    """Gains are weighed against what measuring them costs."""

    calibrate: bool = True
    """Every measurement corrects what is believed about the others."""

    prune: bool = True
    """A probe whose candidate cannot become the best any more is stopped."""
