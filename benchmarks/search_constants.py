"""What each constant of the search buys: the same studies with and without another value.

python benchmarks/search_constants.py --raw FILE                # all variants, seeds 30 to 34
python benchmarks/search_constants.py --raw FILE --only LEVEL   # variants whose name contains it
python benchmarks/search_constants.py --raw FILE --table        # the table of what FILE holds

A variant gives one constant another value, mostly twice and half of its own, in every module that
imports it. Its studies are compared with the unchanged search on the same machines (development
seeds, never those of the pages). FILE has a line for each study; started again, it continues. A
variant that changes no study of the first seed gets no further ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from search_setups import INDEPENDENT, WORSE, names
from search_studies import OURS, study

from autotune.search.surrogate.gaussian_process import KERNEL_STRUCTURES, Fit, Regression
from autotune.search.surrogate.throughput_model import SPEED_STRUCTURES

SEARCH = "autotune.search."
UNCHANGED = "unchanged"
SLOW_SETUP = f"qwen2.5-1.5b-full-4xl4{WORSE}"
"""Takes half of the time of all cases with worse truth, and is left out."""

# Without one of the rows of the mixtures
FIXED_KERNEL = KERNEL_STRUCTURES[:1]
KNOB_KERNEL = KERNEL_STRUCTURES[1:2]
OWN_KERNEL = KERNEL_STRUCTURES[2:]
LEVEL_AND_KNOBS = SPEED_STRUCTURES[:2]
LEVEL_AND_OWN = SPEED_STRUCTURES[::2]
KNOBS_AND_OWN = SPEED_STRUCTURES[1:]

PAIRS: Mapping[str, tuple[str, Sequence[Any]]] = {
    "EXPLORED_SHARE": (
        "acquisition",
        (0.25, 1.0),
    ),
    "OOM_EXPONENTS": (
        "acquisition",
        ((1.5, 1.5, 1.5), (3.0, 3.0, 3.0), (1.0, 1.0, 1.0)),
    ),
    "COST_EXPONENT": (
        "acquisition",
        (0.0, 1.0),
    ),
    "PLAUSIBLE_CHANCE": (
        "agenda",
        (0.1, 0.5),
    ),
    "REMOTE_CHANCE": (
        "agenda",
        (0.01, 0.1),
    ),
    "MAX_LAST_RESORTS": (
        "agenda",
        (3, 12),
    ),
    "MIN_REFUSED_CHANCE": (
        "agenda",
        (0.0, 1e-2),
    ),
    "LEAST_GAIN": (
        "confirmation",
        (0.00025, 0.001),
    ),
    "TRAINING_SECONDS": (
        "confirmation",
        (86_400.0, 345_600.0),
    ),
    "LIKELY_CHANCE": (
        "predicted_order",
        (0.25, 0.75),
    ),
    "PRUNE_SHARE": (
        "pruning",
        (0.8, 0.99),
    ),
    "MIN_SCALE_VALUES": (
        "surrogate.candidate_table",
        (2, 4),
    ),
    "SWITCH_DOUBLINGS": (
        "surrogate.candidate_table",
        (1.0, 4.0),
    ),
    "REFUSED_CHANCE": (
        "surrogate.estimates",
        (1e-3, 0.1),
    ),
    "KERNEL_STRUCTURES": (
        "surrogate.gaussian_process",
        (FIXED_KERNEL, KNOB_KERNEL, OWN_KERNEL),
    ),
    "SCALES": (
        "surrogate.gaussian_process",
        ((1.0,), (1.8,), (1.0, 3.0)),
    ),
    "MIN_RELATIVE_WEIGHT": (
        "surrogate.gaussian_process",
        (0.0, 0.1),
    ),
    "FULL_EFFECT": (
        "surrogate.knob_effects",
        (0.025, 0.1),
    ),
    "MIN_WEIGHT": (
        "surrogate.knob_effects",
        (0.0, 0.05, 0.2),
    ),
    "EQUAL_SHARE": (
        "surrogate.knob_effects",
        (1e-9, 1e-2),
    ),
    "MIN_MEMORY_WIDTH": (
        "surrogate.memory_model",
        (0.04, 0.16),
    ),
    "UNPREDICTED_WIDTH": (
        "surrogate.memory_model",
        (0.35, 1.4),
    ),
    "NEED_PER_DOUBLING": (
        "surrogate.memory_model",
        (0.0, 0.05, 0.2),
    ),
    "UNPREDICTED_STRETCH_SHARE": (
        "surrogate.memory_model",
        (0.05, 0.2),
    ),
    "MEMORY_NOISE": (
        "surrogate.memory_model",
        ((0.004,), (0.02,)),
    ),
    "OOM_FACTOR": (
        "surrogate.memory_model",
        (1.0, 1.02),
    ),
    "MIN_BOUND_DEVIATION": (
        "surrogate.memory_model",
        (0.002, 0.04),
    ),
    "LENGTH_SCALE": (
        "surrogate.similarity",
        (0.3, 1.2),
    ),
    "JOINT_DECAY": (
        "surrogate.similarity",
        (0.3, 1.0),
    ),
    "MIN_PHASE_WIDTH": (
        "surrogate.throughput_model",
        (0.075, 0.3),
    ),
    "MAX_WIDTH": (
        "surrogate.throughput_model",
        (0.5, 2.0),
    ),
    "LEVEL_DEVIATION": (
        "surrogate.throughput_model",
        (0.25, 1.0),
    ),
    "SPEED_STRUCTURES": (
        "surrogate.throughput_model",
        (LEVEL_AND_KNOBS, LEVEL_AND_OWN, KNOBS_AND_OWN),
    ),
    "CLIFF_FACTOR": (
        "surrogate.throughput_model",
        (2.0, 6.0, 1e9),
    ),
    "UNPREDICTED_SPEED_WIDTH": (
        "surrogate.throughput_model",
        (0.3, 1.2),
    ),
    "SPEED_PER_DOUBLING": (
        "surrogate.throughput_model",
        (0.0, 0.035, 0.14),
    ),
    "MIN_PHASE_SHARE": (
        "surrogate.throughput_model",
        (1e-6, 1e-2),
    ),
}
"""Constant: its module, and other values."""


@dataclass(frozen=True)
class Line:
    """One study of a variant."""

    variant: str
    setup: str
    seed: int
    feasible: bool
    share: float
    seconds: float
    seconds_to_95: float | None
    probes: int
    confirmations: int
    out_of_memory: int


class Studies:
    """Studies by variant, setup and seed, kept in a file."""

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._lines: dict[tuple[str, str, int], Line] = {}
        for line in _stored(raw):
            self._lines[line.variant, line.setup, line.seed] = line

    def run(self, variant: str, setup_name: str, seed: int) -> None:
        if (variant, setup_name, seed) in self._lines:
            return
        line = _line(variant, setup_name, seed)
        self._lines[variant, setup_name, seed] = line
        with self._raw.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    def differ(self, variant: str) -> bool:
        """Return True if any study of the variant went another way: others are run no further."""
        if variant == UNCHANGED:
            return True
        for (name, setup_name, seed), line in self._lines.items():
            if name == variant and _went_another_way(
                self._lines[UNCHANGED, setup_name, seed], line
            ):
                return True
        return False


def main() -> None:
    arguments = _arguments()
    if arguments.table:
        print("\n".join(table(_stored(arguments.raw))))
        return
    studies = Studies(arguments.raw)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for variant in _variants(arguments.only or [""]):
            if seed > arguments.first_seed and not studies.differ(variant):
                continue
            for setup_name in _setups():
                studies.run(variant, setup_name, seed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--raw", type=Path, required=True, metavar="FILE")
    parser.add_argument("--first-seed", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="parts of the names of variants")
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def _setups() -> list[str]:
    every = [*names(), *names(ending=INDEPENDENT), *names(ending=WORSE)]
    return [name for name in every if name != SLOW_SETUP]


def _variants(parts: Sequence[str]) -> list[str]:
    """Return the names of the variants, which the unchanged search precedes."""
    variants = [UNCHANGED]
    for constant, (_, values) in PAIRS.items():
        for place in range(len(values)):
            name = f"{constant} {values[place]}"
            if any(part in name for part in parts):
                variants.append(name)
    return variants


def _line(variant: str, setup_name: str, seed: int) -> Line:
    with changed(variant):
        result = study(setup_name, OURS, seed)
    return Line(
        variant=variant,
        setup=setup_name,
        seed=seed,
        feasible=result.feasible,
        share=result.share,
        seconds=result.seconds,
        seconds_to_95=result.seconds_to_95,
        probes=result.probes,
        confirmations=result.confirmations,
        out_of_memory=result.out_of_memory,
    )


@contextmanager
def changed(variant: str) -> Iterator[None]:
    """Give the variant's constant its value in every module that has it."""
    if variant == UNCHANGED:
        yield
        return
    constant = variant.partition(" ")[0]
    module_name, values = PAIRS[constant]
    value = next(value for value in values if f"{constant} {value}" == variant)
    home = sys.modules[SEARCH + module_name]
    former = getattr(home, constant)
    holders: list[ModuleType] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("autotune.") and getattr(module, constant, None) is former:
            holders.append(module)
    _give(holders, constant, former, value)
    try:
        yield
    finally:
        _give(holders, constant, value, former)


def _give(
    holders: Sequence[ModuleType],
    constant: str,
    former: Any,
    value: Any,
) -> None:
    for module in holders:
        setattr(module, constant, value)
    for function in (Fit.__init__, Regression.__init__):  # their defaults hold a constant
        before = function.__defaults__ or ()
        defaults = [value if default is former else default for default in before]
        function.__defaults__ = tuple(defaults)


def _stored(raw: Path) -> list[Line]:
    if not raw.exists():
        return []
    lines = []
    for text in raw.read_text().splitlines():
        lines.append(Line(**json.loads(text)))
    return lines


def table(lines: Sequence[Line]) -> list[str]:
    """Return the rows of a table: gain or loss by every variant, with standard errors."""
    by_variant: dict[str, dict[tuple[str, int], Line]] = {}
    for line in lines:
        by_variant.setdefault(line.variant, {})[line.setup, line.seed] = line
    unchanged = by_variant.pop(UNCHANGED, {})
    columns = (
        "constant, other value",
        "studies",
        "changed",
        "share",
        "independent, usual, worse, tables",
        "below 95 %",
        "seconds of a study",
        "seconds to 95 %",
        "errors",
    )
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for variant, studies in by_variant.items():
        shared = sorted(unchanged.keys() & studies.keys())
        pairs = [(unchanged[key], studies[key]) for key in shared if unchanged[key].feasible]
        rows.append(_row(variant, pairs))
    return rows


def _row(variant: str, pairs: Sequence[tuple[Line, Line]]) -> str:
    kinds: dict[str, list[float]] = {}
    gains = []
    below = 0
    errors = 0
    different = 0
    seconds = []
    seconds_to_95 = []
    for before, after in pairs:
        gain = after.share - before.share
        gains.append(gain)
        kinds.setdefault(_kind(before.setup), []).append(gain)
        below += (after.share < 0.95) - (before.share < 0.95)
        errors += after.out_of_memory - before.out_of_memory
        different += _went_another_way(before, after)
        seconds.append(math.log(after.seconds / before.seconds))
        if after.seconds_to_95 and before.seconds_to_95:
            seconds_to_95.append(math.log(after.seconds_to_95 / before.seconds_to_95))
    by_kind = [f"{statistics.fmean(kinds[kind]):+.3f}" for kind in sorted(kinds)]
    return (
        f"| `{variant}` | {len(pairs)} | {different} | {_with_error(gains, 4)} |"
        f" {', '.join(by_kind)} | {below:+d} | {_percent(seconds)} | {_percent(seconds_to_95)} |"
        f" {errors / max(1, len(pairs)):+.2f} |"
    )


def _went_another_way(before: Line, after: Line) -> bool:
    return (after.probes, after.seconds) != (before.probes, before.seconds)


def _kind(setup_name: str) -> str:
    if setup_name.startswith("table_"):
        return "4 tables"
    if setup_name.endswith(WORSE):
        return "3 worse"
    return "1 independent" if setup_name.endswith(INDEPENDENT) else "2 usual"


def _with_error(values: Sequence[float], digits: int) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):+.{digits}f} ± {error:.{digits}f}"


def _percent(logs: Sequence[float]) -> str:
    """Return the mean of logarithmic ratios in per cent."""
    scaled = [100 * value for value in logs]
    return f"{_with_error(scaled, 1)} %" if scaled else ""


if __name__ == "__main__":
    main()
