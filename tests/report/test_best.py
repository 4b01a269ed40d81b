"""Best answer so far: written at once; a failed write ends no search."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autotune.core.answer import Recommendation
from autotune.core.errors import BadInput
from autotune.core.events import BestChanged, Event, Note
from autotune.core.job import Job
from autotune.report.output_folder import best_so_far_listener, head_lines
from tests.report.answers import answered


def best_so_far() -> BestChanged:
    case = answered(1024)
    return BestChanged(
        job=case.job, answer=dataclasses.replace(case.answer, interrupted=True, certificate=None)
    )


def test_a_new_best_is_written_and_reported_before_the_search_continues() -> None:
    written: list[Recommendation] = []
    heard: list[Event] = []
    best_so_far_listener(heard.append, lambda _, answer: written.append(answer))(best_so_far())
    assert [answer.winner is not None for answer in written] == [True]
    assert (
        isinstance(heard[0], BestChanged)
        and isinstance(heard[1], Note)
        and "best so far" in heard[1].text
    )
    head = head_lines(best_so_far().job, written[0])
    assert head[0].startswith("BEST SO FAR") and "still missing" in head[1]


def test_a_full_disk_is_reported_and_the_search_continues() -> None:
    def full(job: Job, answer: Recommendation) -> Path:
        raise BadInput("No space left on device.", way_out="Make room.")

    heard: list[Event] = []
    best_so_far_listener(heard.append, full)(best_so_far())
    assert isinstance(heard[1], Note) and "not written: No space left" in heard[1].text
