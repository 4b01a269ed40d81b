"""First probe in a short budget: what it gains to begin with another candidate than the baseline.

python benchmarks/search_budgets.py --seeds 10    # results/search_budgets.{json,md}

Our search on the simulated cases of benchmarks/search.py, with budgets of minutes: as it is
(`autotune.search.first_probe`), and with the baseline first in any case. A share is that of the
true optimum which the answer has; 0 without an answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

from search_setups import Setup, names, setup

from autotune.core.answer import Recommendation
from autotune.search import agenda
from autotune.search.loop import Clock, run_search
from autotune.search.study import open_study

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the executor of the tests
from tests.inline_executor import InlineExecutor

RESULTS = Path(__file__).resolve().parent / "results"
MINUTES = (1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
FIRST_SEED = 100
"""Others than those of the search benchmark."""

ABOUT = """# The first probe in a short budget

Our search on nine simulated cases (benchmarks/search_simulator.py) within a few minutes. "Baseline
first" measures TRL's defaults before anything else. "By gain" begins with another candidate where
the budget is predicted not to pay for it after the baseline (`autotune/search/first_probe.py`).
Share: true speed of the answer as a share of the best there is; 0 without an answer.
"""


@dataclass(frozen=True, kw_only=True)
class Ending:
    setup: str
    seed: int
    minutes: float
    by_gain: bool
    began_with_baseline: bool
    probes: int
    confirmed: bool
    answered: bool
    share: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    endings = []
    for name in names():
        if name.startswith("table_"):
            continue
        for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds):
            for minutes in MINUTES:
                for by_gain in (False, True):
                    endings.append(_search(setup(name), seed, minutes, by_gain))
        print(name, flush=True)
    rows = [asdict(ending) for ending in endings]
    lines = ",\n".join(json.dumps(row) for row in rows)
    (RESULTS / "search_budgets.json").write_text(f"[\n{lines}\n]\n")
    (RESULTS / "search_budgets.md").write_text(markdown(endings))


def _search(
    posed_setup: Setup,
    seed: int,
    minutes: float,
    by_gain: bool,
) -> Ending:
    machine = posed_setup.machine(seed)
    optimum = posed_setup.optimum(machine)
    posed = posed_setup.posed
    workload = replace(posed.job.task.workload, seed=seed)
    job = replace(posed.job, task=replace(posed.job.task, workload=workload), sampler="value")
    study = open_study(job, posed.candidates, posed.baseline, predictions=posed_setup.predictions)

    def run() -> Recommendation:
        return run_search(
            job,
            study=study,
            executor=InlineExecutor(machine.measure),
            listener=lambda event: None,
            clock=Clock(60 * minutes, now=lambda: machine.now),
        )

    if by_gain:
        answer = run()
    else:
        with patch.object(agenda, "instead_of_baseline", lambda view, seconds: None):
            answer = run()
    winner = None if answer.winner is None else answer.winner.candidate
    return Ending(
        setup=posed_setup.name,
        seed=seed,
        minutes=minutes,
        by_gain=by_gain,
        began_with_baseline=study.view.probes[0].candidate == posed.baseline,
        probes=len(study.view.probes),
        confirmed=answer.certificate is not None,
        answered=winner is not None,
        share=1.0 if optimum is None else optimum.share(winner),
    )


def markdown(endings: Sequence[Ending]) -> str:
    lines = [
        ABOUT,
        f"{len(endings) // (2 * len(MINUTES))} machines for each row.",
        "",
        "| minutes | first probe | baseline is first | probes | answered | confirmed | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for minutes in MINUTES:
        for by_gain in (False, True):
            group = []
            for ending in endings:
                if ending.minutes == minutes and ending.by_gain == by_gain:
                    group.append(ending)
            way = "by gain" if by_gain else "baseline first"
            begins = _mean(group, "began_with_baseline")
            answered = _mean(group, "answered")
            confirmed = _mean(group, "confirmed")
            lines.append(
                f"| {minutes:g} | {way} | {begins:.0%} | {_mean(group, 'probes'):.1f}"
                f" | {answered:.0%} | {confirmed:.0%} | {_mean(group, 'share'):.1%} |"
            )
    return "\n".join(lines) + "\n"


def _mean(group: Sequence[Ending], name: str) -> float:
    return statistics.fmean(getattr(ending, name) for ending in group)


if __name__ == "__main__":
    main()
