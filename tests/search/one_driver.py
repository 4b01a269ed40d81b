"""A driver as a process of its own, on a made-up machine: writes down what it begins to measure,
prints what it concluded.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.events import Event, Note
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space


def main(
    url: str,
    study: str,
    log: str,
    seconds: str,
    how: str,
) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    file = Path(log)
    trainer = ToyTrainer()
    notes: list[str] = []
    turns: dict[str, int] = {}
    job = replace(
        toy_job(file.parent, toy_space(), machine.limit_bytes),
        storage=url,
        study_name=study,
        resume=how == "resume",
    )

    def measure(candidate: Candidate, plan: ProbePlan) -> Measurement:
        kind = "long" if plan.timed_cycles > 3 else "short"
        turns[candidate.id] = sum(
            trial.purpose == "confirm" and trial.candidate == candidate for trial in opened.trials
        )
        with file.open("a") as out:
            out.write(f"{kind} {candidate.id} {turns[candidate.id]}\n")
        time.sleep(float(seconds))
        return machine.measure(candidate, plan)

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    opened = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    file.touch()
    answer = run_search(
        job,
        study=opened,
        executor=InlineExecutor(measure),
        listener=listen,
        clock=Clock(600),
    )
    winner = None if answer.winner is None else answer.winner.candidate.id
    print(
        json.dumps(
            {
                "winner": winner,
                "notes": notes,
                "trials": len(answer.trials),
                "proven": answer.proven,
            }
        )
    )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BadInput as error:
        sys.exit(str(error))
