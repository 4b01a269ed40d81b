"""A timeline stays small however long it gets, and keeps every peak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotune.core.measurement import MemorySample
from autotune.probe.process_meter import (
    FIRST_INTERVAL_SECONDS,
    MAX_INTERVALS,
    Timeline,
    concatenated,
)

SAMPLES = st.lists(
    st.tuples(
        st.floats(0, 5000),
        st.integers(0, 2**40),
        st.sampled_from(["load", "rollout", "backward", None]),
    ),
    min_size=1,
)


def sampled(samples: list[tuple[float, int, str | None]]) -> tuple[MemorySample, ...]:
    now = [0.0]
    line = Timeline(clock=lambda: now[0])
    for now[0], used, phase in samples:
        line.take(used, phase)  # type: ignore[arg-type]
    return line.moments()


def test_short_timelines_are_exact() -> None:
    timeline = sampled(
        [(0.01, 5, "load"), (0.02, 9, "load"), (0.15, 7, "rollout"), (0.31, 3, None)]
    )
    assert [(sample.peak_bytes, sample.phase) for sample in timeline] == [
        (9, "load"),
        (7, "rollout"),
        (3, None),
    ]
    assert [sample.seconds for sample in timeline] == [0.1, 0.2, 0.4]


@given(SAMPLES)
def test_every_peak_is_kept_and_none_is_invented(
    samples: list[tuple[float, int, str | None]],
) -> None:
    samples.sort(key=lambda sample: sample[0])
    timeline = sampled(samples)
    assert 0 < len(timeline) <= MAX_INTERVALS
    assert max(sample.peak_bytes for sample in timeline) == max(used for _, used, _ in samples)
    assert {(sample.peak_bytes, sample.phase) for sample in timeline} <= {
        (used, phase) for _, used, phase in samples
    }
    seconds = [sample.seconds for sample in timeline]
    assert seconds == sorted(set(seconds))
    # An interval is as wide as the time needs and at most twice that.
    assert (
        samples[-1][0]
        <= seconds[-1]
        <= samples[-1][0] + max(FIRST_INTERVAL_SECONDS, 4 * samples[-1][0] / MAX_INTERVALS) + 0.001
    )


def test_concatenated_timelines() -> None:
    first, then = (
        (
            MemorySample(
                seconds=2.0,
                peak_bytes=1,
                phase="load",
            ),
        ),
        (
            MemorySample(
                seconds=0.5,
                peak_bytes=2,
                phase="backward",
            ),
        ),
    )
    assert [sample.seconds for sample in concatenated(first, then, 2.25)] == [2.0, 2.75]
