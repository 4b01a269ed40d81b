"""A training that really hangs: it is said, with its stacks, and ended only with --end-hangs.

A hang takes a minute at least, most of it spent waiting: both runs hang at the same time.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.guard.child import FAULT_STEP
from tests.guard.guarded import GuardedRun

pytestmark = pytest.mark.slow

SLOW_STEPS = {"STEP_SECONDS": "0.7"}  # the usual time is known after three of them


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GuardedRun, GuardedRun]]:
    """Start two runs that hang: one is to be ended, the other has no flag."""
    ended_folder, watched_folder = (tmp_path_factory.mktemp(name) for name in ("ended", "watched"))
    hang = {"FAULT": "hang", **SLOW_STEPS}
    ended = GuardedRun(ended_folder, "--end-hangs", WITH="grandchild", **hang)
    watched = GuardedRun(watched_folder, **hang)
    yield ended, watched
    for guarded in (ended, watched):
        guarded.process.kill()


def test_a_hang_is_ended_with_its_stacks_and_restarted(
    hanging: tuple[GuardedRun, GuardedRun],
) -> None:
    guarded, _ = hanging
    code, messages = guarded.end()
    assert code == 0, messages
    assert "no step for" in messages and "and no GPU computes" in messages
    first, second = guarded.document["attempts"]
    assert first["end"]["reason"] == "hang"
    assert (first["last_step"], second["from_step"]) == (FAULT_STEP, 6)
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "8"], "unchanged"
    guarded.assert_complete()
    guarded.wait_until_gone()
    stacks = guarded.folder / "guard" / "stacks-1.txt"
    if shutil.which("py-spy") is None:
        assert "py-spy is not there" in messages
    else:
        assert "wait_for_a_rank_that_never_comes (" in stacks.read_text()


def test_without_the_flag_it_is_only_said(hanging: tuple[GuardedRun, GuardedRun]) -> None:
    _, guarded = hanging
    assert guarded.process.stderr is not None
    while "no step for" not in guarded.process.stderr.readline():
        assert guarded.process.poll() is None
    assert guarded.child()
    guarded.process.send_signal(signal.SIGTERM)
    code, _ = guarded.end()
    assert code == 128 + signal.SIGTERM
    assert len(guarded.attempts) == 1
