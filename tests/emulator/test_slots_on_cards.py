"""Slots and nodes on emulated cards: every training process has its own card and no other."""

from __future__ import annotations

import pytest

from tests.emulator.executor_on_cards import HEAD, ROOT
from tests.emulator.on_cards import cards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_slot_of_eight_cards_trains_on_its_own(python: str) -> None:
    program = (
        HEAD
        + """
running = executor("2xL4", ranks=2, slots=4)
found = [None] * 4
def one(slot):
    try:
        found[slot] = told(measured(running, slot, mib=1000 * (slot + 1)))
    except Exception as error:
        found[slot] = {"outcome": repr(error)}
threads = [threading.Thread(target=one, args=(slot,)) for slot in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
running.close()
print(json.dumps(found))
"""
    )
    with cards(python, "8xL4") as stand:
        ran = stand.run(program, PYTHONPATH=ROOT)
    assert [slot_report["outcome"] for slot_report in ran.answer] == ["ok"] * 4, ran.output
    assert [slot_report["visible"] for slot_report in ran.answer] == ["0,1", "2,3", "4,5", "6,7"]
    assert [slot_report["count"] for slot_report in ran.answer] == [2] * 4
    for slot, slot_report in enumerate(ran.answer):
        assert [int(card) for card in slot_report["cards"]] == [2 * slot, 2 * slot + 1]
        assert all(
            1000 * (slot + 1) <= mib <= 1000 * (slot + 1) + 700
            for mib in slot_report["cards"].values()
        ), slot_report
    # What the emulator counted is the truth.
    used = [card for process in ran.report.processes for card in process.peak_bytes]
    assert sorted(used) == list(range(8))


def test_a_job_of_one_card_sees_no_other(python: str) -> None:
    program = (
        HEAD
        + """
running = executor("1xL4")
print(json.dumps(told(measured(running, mib=500))))
running.close()
"""
    )
    with cards(python, "2xL4") as stand:
        report = stand.run(program, PYTHONPATH=ROOT, CUDA_VISIBLE_DEVICES="1,0").answer
    assert (report["outcome"], report["visible"], report["count"]) == ("ok", "1", 1)


def test_ranks_of_a_second_node_take_its_cards_by_local_number(python: str) -> None:
    program = (
        HEAD
        + """
running = executor("2xL4", ranks=2)
running._slots[0].worker.span = RankSpan(first=2, world=4, address="127.0.0.1", port=1)
print(json.dumps(told(measured(running, mib=500))))
running.close()
"""
    )
    with cards(python, "2xL4") as stand:
        report = stand.run(program, PYTHONPATH=ROOT).answer
    assert report["outcome"] == "ok", report
    assert list(report["cards"]) == ["0", "1"]
