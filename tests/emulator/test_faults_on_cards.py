"""Failures on emulated cards, met by real ranks of a worker: their phase, kind and rank are
named right.
"""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.measurement import PHASES
from tests.emulator.executor_on_cards import HEAD, ROOT
from tests.emulator.on_cards import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def on(
    python: str,
    machine: str,
    program: str,
) -> Any:
    return run(python, machine, HEAD + program, PYTHONPATH=ROOT).answer


def test_out_of_memory_in_each_phase_is_named_and_the_next_candidate_fits(python: str) -> None:
    program = f"""
running = executor("1xL4")
phases = {PHASES!r}
found = [told(measured(running, phase=phase,
    **({{"load_mib": 30_000}} if phase == "load" else {{"mib": 30_000}})))
         for phase in phases]
found.append(told(measured(running, mib=3000)))
print(json.dumps(found)); running.close()
"""
    *failed, fits = on(python, "L4", program)
    assert [failure["outcome"] for failure in failed] == [f"oom_{phase}" for phase in PHASES]
    assert [failure["phase"] for failure in failed] == list(PHASES)
    assert all("Tried to allocate 29.30 GiB" in failure["failure"] for failure in failed)
    assert fits["outcome"] == "ok" and 3000 <= fits["cards"]["0"] < 3600


def test_a_rank_that_is_killed_is_the_cause_and_not_its_peer(python: str) -> None:
    program = """
running = executor("2xL4", ranks=2)
print(json.dumps(told(measured(running, killed=1, phase="optimizer")))); running.close()
"""
    report = on(python, "2xL4", program)
    assert not report["outcome"].startswith(("ok", "oom")), report
    assert report["rank"] == 1 and "SIGKILL" in report["failure"], report


def test_a_collective_that_nobody_joins_ends_at_the_deadline(python: str) -> None:
    program = """
running = executor("2xL4", ranks=2)
measured(running, mib=1)
print(json.dumps(told(measured(running, seconds=25, absent=1, phase="sync")))); running.close()
"""
    report = on(python, "2xL4", program)
    assert report["outcome"] == "timeout" and report["phase"] == "sync", report
    assert "hung" in report["failure"]
