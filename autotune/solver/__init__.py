"""`autotune solve`, predictions turned round: the largest value of a setting that fits, the
cheapest hardware that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.errors import BadInput
from autotune.core.events import Listener, ignore_events
from autotune.core.job import Job
from autotune.request.command_flags import SolveOptions
from autotune.request.flags import Flags, flags_of
from autotune.request.request_parser import read_sources
from autotune.solver.cheapest_hardware import (
    CheapestHardware,
    find_cheapest_hardware,
    hardware_document,
    hardware_lines,
)
from autotune.solver.largest_value import GPUS, LargestValue, find_largest_value
from autotune.solver.value_report import value_document, value_lines


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class SolveAnswer:
    """Answer of `solve`."""

    job: Job  # the request itself
    largest: LargestValue | None = None  # None: hardware was solved for
    cheapest: CheapestHardware | None = None  # None: a setting was solved for
    document: dict[str, Any]  # content of `solve --json`

    def __repr__(self) -> str:
        lines: list[str] = []
        if self.largest is not None:
            lines = list(value_lines(self.largest))
        elif self.cheapest is not None:
            lines = list(hardware_lines(self.cheapest))
        # The first line says that nothing was measured.
        return f"<SolveAnswer, predicted: {' '.join(lines[1:2])}>"


def solve(setting: str, *, listener: Listener = ignore_events, **options: Any) -> SolveAnswer:
    """Return the largest value of a setting that fits by prediction; with `setting="gpus"` and
    `price="prices.yaml"` the cheapest hardware of that list."""
    flags = flags_of(options, {*SolveOptions.__annotations__, "arguments"})
    return solve_flags(setting, flags, listener=listener)


def solve_flags(
    setting: str,
    flags: Flags,
    *,
    listener: Listener = ignore_events,
) -> SolveAnswer:
    """Solve for parsed flags."""
    sources = read_sources(flags, mode="predict")
    if setting == GPUS:
        job, offers = find_cheapest_hardware(sources, listener)
        return SolveAnswer(
            job=job,
            cheapest=offers,
            document=hardware_document(job, offers),
        )
    if sources.values.prices is not None:
        raise BadInput(
            "--price belongs to `autotune solve gpus`.", way_out="Leave it out, or solve for gpus."
        )
    job, largest = find_largest_value(setting, sources, listener)
    return SolveAnswer(
        job=job,
        largest=largest,
        document=value_document(job, largest),
    )
