"""A timeline stays small however long it gets, and keeps every peak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotune.measurement import Moment
from autotune.rig.timeline import FIRST_SECONDS, MOST, Timeline, one_after_the_other

SAMPLES = st.lists(
    st.tuples(st.floats(0, 5000), st.integers(0, 2**40), st.sampled_from(["load", "rollout", "backward", None])), min_size=1
)


def followed(samples: list[tuple[float, int, str | None]]) -> tuple[Moment, ...]:
    now = [0.0]
    line = Timeline(clock=lambda: now[0])
    for now[0], used, phase in samples:
        line.take(used, phase)  # type: ignore[arg-type]
    return line.moments()


def test_short_ones_are_told_as_they_were() -> None:
    told = followed([(0.01, 5, "load"), (0.02, 9, "load"), (0.15, 7, "rollout"), (0.31, 3, None)])
    assert [(moment.peak_bytes, moment.phase) for moment in told] == [(9, "load"), (7, "rollout"), (3, None)]
    assert [moment.seconds for moment in told] == [0.1, 0.2, 0.4]


@given(SAMPLES)
def test_no_peak_is_lost_and_none_is_made_up(samples: list[tuple[float, int, str | None]]) -> None:
    samples.sort(key=lambda sample: sample[0])
    told = followed(samples)
    assert 0 < len(told) <= MOST
    assert max(moment.peak_bytes for moment in told) == max(used for _, used, _ in samples)
    assert {(moment.peak_bytes, moment.phase) for moment in told} <= {(used, phase) for _, used, phase in samples}
    seconds = [moment.seconds for moment in told]
    assert seconds == sorted(set(seconds))
    # A stretch is as long as the time needs and at most twice that.
    assert samples[-1][0] <= seconds[-1] <= samples[-1][0] + max(FIRST_SECONDS, 2 * samples[-1][0] / (MOST / 2)) + 0.001


def test_a_command_after_another() -> None:
    first, then = (Moment(seconds=2.0, peak_bytes=1, phase="load"),), (Moment(seconds=0.5, peak_bytes=2, phase="backward"),)
    assert [moment.seconds for moment in one_after_the_other(first, then, 2.25)] == [2.0, 2.75]
