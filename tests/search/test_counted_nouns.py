"""Notes about one probe have the singular."""

from __future__ import annotations

from pathlib import Path

from autotune.core.events import Event, Note
from autotune.core.measurement import Outcome
from autotune.search.loop import legal_candidates
from tests.search.test_relaxation import _answer, _asked


def test_one_crash_among_candidates_that_do_not_fit_is_one_probe(tmp_path: Path) -> None:
    request, machine = _asked(tmp_path, 220)
    events: list[Event] = []
    baseline = legal_candidates(request.job, request.trainer)[0]
    machine.outcomes = {baseline.id: Outcome.CRASH}
    _answer(request, machine, events)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("not relaxed: 1 probe crashed, not for lack of memory" in note for note in notes)
