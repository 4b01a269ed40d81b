"""What works is written down as soon as it is known, and what can't be written costs no measurement."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autotune.errors import BadInput
from autotune.events import BestChanged, Event, Note
from autotune.question import Question
from autotune.recommendation import Recommendation
from autotune.report import head_lines, keeping_the_best
from tests.report.answers import answered


def best_so_far() -> BestChanged:
    found = answered(1024)
    return BestChanged(question=found.question, answer=dataclasses.replace(found.answer, interrupted=True, certificate=None))


def test_a_new_best_is_written_before_the_search_goes_on_and_told() -> None:
    written: list[Recommendation] = []
    heard: list[Event] = []
    keeping_the_best(heard.append, lambda _, answer: written.append(answer))(best_so_far())
    assert [answer.winner is not None for answer in written] == [True]
    assert isinstance(heard[0], BestChanged) and isinstance(heard[1], Note) and "the best so far" in heard[1].text
    head = head_lines(best_so_far().question, written[0])
    assert head[0].startswith("BEST SO FAR") and "still to come" in head[1]


def test_a_full_disk_is_told_and_the_search_goes_on() -> None:
    def full(question: Question, answer: Recommendation) -> Path:
        raise BadInput("No space left on device.", way_out="Make room.")

    heard: list[Event] = []
    keeping_the_best(heard.append, full)(best_so_far())
    assert isinstance(heard[1], Note) and "not written down: No space left" in heard[1].text
