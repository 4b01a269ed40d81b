"""Evidence that the machine did other work during a search: repeats of one candidate that differ
more than repeats do.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.answer import Recommendation, Trial

# Ratio of two measured speeds of one candidate. On quiet machines repeats differed by at most 1.1.
BUSY_RATIO = 1.5


def busy_machine_text(answer: Recommendation) -> str | None:
    """Return a sentence with the two speeds that differ most; None if the repeats agree."""
    rates = _most_unlike_repeats(answer.trials)
    if rates is None:
        return None
    first, second = rates
    return (
        f"This machine was busy: {first:,.0f}, then {second:,.0f} tokens/s for the same candidate."
        " Repeat the search when it is idle."
    )


def _most_unlike_repeats(trials: Iterable[Trial]) -> tuple[float, float] | None:
    """Return the two speeds, in the order of their measurement."""
    # A probe among others is slower for that reason: repeats are those among as many.
    repeats: dict[tuple[str, int], list[float]] = {}
    for trial in trials:
        speed = trial.measurement.worst
        if speed is None or speed.cut_short or trial.measurement.emulated:
            continue
        key = trial.candidate.id, trial.measurement.beside or 0
        repeats.setdefault(key, []).append(speed.tokens_per_second)

    most_unlike = None
    largest_ratio = BUSY_RATIO
    for rates in repeats.values():
        slowest = min(rates)
        fastest = max(rates)
        if fastest <= largest_ratio * slowest:
            continue
        largest_ratio = fastest / slowest
        most_unlike = (fastest, slowest)
        if rates.index(slowest) < rates.index(fastest):
            most_unlike = (slowest, fastest)
    return most_unlike
