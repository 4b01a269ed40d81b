"""Commands of the user's own: what is refused, and what is limit about their restarts."""

from __future__ import annotations

import pytest

from autotune.core.errors import BadInput
from autotune.guard.own_training import OwnTraining, check_pattern


@pytest.mark.parametrize("pattern", ["out/step", "out/{step}/state", "out/{checkpoint}"])
def test_checkpoints_whose_steps_cannot_be_told_apart_are_refused(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"has no \{step\}"):
        check_pattern(pattern)
    check_pattern("out/step_{step}")
    check_pattern(None)


@pytest.mark.parametrize(
    ("command", "pattern", "limit"),
    [
        (("train", "{checkpoint}"), "out/step_{step}", ""),
        (("train",), "out/step_{step}", "names no {checkpoint}"),
        (("train", "{checkpoint}"), None, "--checkpoints does not say"),
    ],
)
def test_a_restart_from_step_0_is_said(
    command: tuple[str, ...],
    pattern: str | None,
    limit: str,
) -> None:
    limits = OwnTraining(
        command_words=command,
        ladder={},
        pattern=pattern,
    ).limits
    assert limit in limits and bool(limit) == bool(limits)
