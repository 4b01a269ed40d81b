"""Parts of the search that a benchmark can switch off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Switches; all on in normal use."""

    screen: bool = True  # Skip candidates that the corrected prediction rules out
    imply: bool = True  # Derive from an out-of-memory error that more demanding candidates fail too
    value_per_second: bool = True  # Divide expected gains by the cost of measuring them
    calibrate: bool = True  # Update the estimates of all candidates after each measurement
    prune: bool = True  # Stop a probe early once its candidate cannot become the best
