"""Device memory over time, and its division between the probe and others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.nvml import Nvml
from autotune.probe.device_meter import (
    ELSEWHERE,
    HIDDEN,
    DeviceMeter,
    Reading,
    newcomers,
    read,
    split,
)
from tests.probe.nvml_playback import Playback

MIB = 2**20
FIRST, SECOND = (
    "GPU-5c0f3e00-aaaa-bbbb-cccc-000000000000",
    "GPU-5c0f3e01-aaaa-bbbb-cccc-000000000001",
)


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def metered(
    recording: str,
    *uuids: str,
    own_pids: tuple[int, ...] = (9007001, 9007002),
    is_visible: bool = True,
) -> Iterator[tuple[Playback, DeviceMeter]]:
    library = Playback(recording)
    nvml = Nvml.open(library)
    before = {uuid: read(nvml, uuid) for uuid in uuids}
    meter = DeviceMeter(
        nvml,
        uuids,
        before,
        lambda: own_pids,
        is_visible=lambda pid: is_visible,
        interval_seconds=0.001,
        list_seconds=0.002,
    )
    try:
        yield library, meter
    finally:
        meter.close()


def test_peaks_by_gpu_and_phase_exclude_other_processes() -> None:
    with metered("two_a100", FIRST, SECOND) as (library, meter):
        meter.enter("rollout")
        library.at(1)
        meter.look()
        meter.enter("backward")
        library.at(2)
        meter.look()
        meter.enter(None)
        library.at(3)
        meter.look()
        peaks, course = meter.peaks(), meter.timeline()
    first, second = peaks[FIRST], peaks[SECOND]
    assert max(course, key=lambda moment: moment.peak_bytes).phase == "backward"
    assert max(moment.peak_bytes for moment in course) == first.peak_bytes, "of the fullest GPU"
    assert first.peak_bytes == (31760 - 3080) * MIB
    assert first.phase_peak_bytes["rollout"] == (21520 - 3080) * MIB
    assert first.phase_peak_bytes["backward"] == first.peak_bytes
    assert first.listed_peak_bytes == 28672 * MIB
    assert (second.peak_bytes, second.listed_peak_bytes) == ((17000 - 4) * MIB, 16900 * MIB)
    assert first.why is None and not first.newcomers


def test_thread_samples_and_mark_resets() -> None:
    with metered("two_a100", FIRST) as (library, meter):
        library.at(2)
        assert until(lambda: meter.peaks()[FIRST].peak_bytes == (31760 - 3080) * MIB)
        library.at(0)
        assert until(lambda: meter.peaks()[FIRST].foreign_bytes == 3080 * MIB)
        meter.mark()
        meter.look()
        assert meter.peaks()[FIRST].peak_bytes == 0
        assert meter.peaks()[FIRST].listed_peak_bytes is None, "nothing of ours is listed any more"


@pytest.mark.parametrize(
    ("recording", "visible", "own_mib", "why"),
    [
        ("no_process_memory", True, 9220 - 1028, HIDDEN),
        ("no_permission", True, 6148 - 4, "Insufficient Permissions"),
        ("other_namespace", False, 8196 - 4, "outside of this container"),
    ],
)
def test_without_a_process_list_the_device_total_is_used(
    recording: str,
    visible: bool,
    own_mib: int,
    why: str,
) -> None:
    with metered(recording, FIRST, is_visible=visible) as (library, meter):
        meter.look()
        library.at(1)
        meter.look()
        peaks = meter.peaks()[FIRST]
    assert peaks.peak_bytes == own_mib * MIB
    assert peaks.listed_peak_bytes is None
    assert peaks.why is not None and why in peaks.why


def test_mig_slice_is_metered_alone() -> None:
    uuid = "MIG-11111111-aaaa-bbbb-cccc-000000000001"
    with metered("mig", uuid) as (library, meter):
        library.at(1)
        meter.look()
        assert meter.peaks()[uuid].peak_bytes == 8000 * MIB


def test_newcomer_is_reported_and_not_counted_as_ours() -> None:
    with metered("newcomer", FIRST, own_pids=(9007001,)) as (library, meter):
        for moment in (1, 2):
            library.at(moment)
            meter.look()
        peaks = meter.peaks()[FIRST]
    assert peaks.newcomers == {9008080: 20480 * MIB}
    assert peaks.listed_peak_bytes == 10240 * MIB


def test_lost_gpu_ends_the_metering_and_is_recorded() -> None:
    with metered("lost", FIRST) as (library, meter):
        library.at(1)
        assert until(lambda: meter.lost is not None)
        assert meter.lost is not None and FIRST in meter.lost


OURS = {9007001, 9007002}


def everywhere(pid: int) -> bool:
    return True


def nowhere(pid: int) -> bool:
    return False


def test_listed_others_and_unlisted_bytes_are_foreign() -> None:
    before = Reading(used_bytes=110, processes={1: 100})
    shares = split(
        Reading(used_bytes=560, processes={1: 130, 9007001: 400}), before, OURS, everywhere
    )
    assert (shares.foreign_bytes, shares.listed_bytes, shares.others, shares.why) == (
        140,
        400,
        {1: 130},
        None,
    )
    assert newcomers(shares, before) == {1: 30}


def test_without_bytes_per_process_all_growth_is_ours() -> None:
    for processes in (None, {1: None, 9007001: None}):
        before = Reading(used_bytes=110, processes={1: 100})
        shares = split(Reading(used_bytes=560, processes=processes), before, OURS, everywhere)
        assert (shares.foreign_bytes, shares.listed_bytes, shares.why) == (110, None, HIDDEN)


def test_reason_for_a_missing_list_is_passed_on() -> None:
    before = Reading(
        used_bytes=4,
        processes=None,
        why="Insufficient Permissions",
    )
    assert (
        split(Reading(used_bytes=9, processes={}), before, OURS, everywhere).why
        == "Insufficient Permissions"
    )


def test_pids_of_another_namespace_are_not_other_processes() -> None:
    before = Reading(used_bytes=4, processes={})
    shares = split(Reading(used_bytes=904, processes={9194301: 890}), before, OURS, nowhere)
    assert (shares.foreign_bytes, shares.why, newcomers(shares, before)) == (4, ELSEWHERE, {})
    # A pid of our namespace is another process all the same.
    assert split(
        Reading(used_bytes=904, processes={4242: 890}), before, OURS, everywhere
    ).others == {4242: 890}
    # And where ours are listed, a stranger is one.
    assert split(
        Reading(used_bytes=904, processes={9194301: 800, 9007001: 90}), before, OURS, nowhere
    ).others == {9194301: 800}


def test_a_number_that_held_memory_before_is_not_ours() -> None:
    before = Reading(used_bytes=110, processes={9007001: 100})
    shares = split(
        Reading(used_bytes=510, processes={9007001: 100, 9007002: 400}), before, OURS, everywhere
    )
    assert (shares.foreign_bytes, shares.listed_bytes, shares.others) == (110, 400, {9007001: 100})


def test_in_a_namespace_of_its_own_one_unknown_number_makes_all_of_them_doubtful() -> None:
    before = Reading(used_bytes=4, processes={})
    now = Reading(used_bytes=904, processes={9194301: 800, 9007001: 90})
    shares = split(now, before, OURS, lambda pid: pid in OURS, own_namespace=True)
    assert (shares.foreign_bytes, shares.why, newcomers(shares, before)) == (4, ELSEWHERE, {})
    assert split(now, before, OURS, everywhere, own_namespace=True).others == {9194301: 800}


BYTES = st.integers(min_value=0, max_value=10**12)


@given(
    own_bytes=st.dictionaries(st.sampled_from([9007001, 9007002]), BYTES, min_size=1),
    other_bytes=st.dictionaries(st.integers(1, 50), BYTES),
    joined=st.dictionaries(st.integers(51, 99), BYTES),
    unbooked=BYTES,
)
def test_parts_add_up_for_any_processes(
    own_bytes: dict[int, int],
    other_bytes: dict[int, int],
    joined: dict[int, int],
    unbooked: int,
) -> None:
    before = Reading(used_bytes=unbooked + sum(other_bytes.values()), processes=other_bytes)
    used = unbooked + sum(other_bytes.values()) + sum(joined.values()) + sum(own_bytes.values())
    shares = split(
        Reading(used_bytes=used, processes={**other_bytes, **joined, **own_bytes}),
        before,
        OURS,
        everywhere,
    )
    assert used - shares.foreign_bytes == sum(own_bytes.values()) == shares.listed_bytes
    assert sum(newcomers(shares, before).values()) == sum(joined.values())
