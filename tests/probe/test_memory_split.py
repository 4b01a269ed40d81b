from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.device_meter import ELSEWHERE, HIDDEN, Reading, newcomers, split

OURS = {9007001, 9007002}


def everywhere(pid: int) -> bool:
    return True


def nowhere(pid: int) -> bool:
    return False


def test_listed_others_and_unlisted_bytes_are_foreign() -> None:
    before = Reading(used_bytes=110, processes={1: 100})
    found = split(Reading(used_bytes=560, processes={1: 130, 9007001: 400}), before, OURS, everywhere)
    assert (found.foreign_bytes, found.listed_bytes, found.others, found.why) == (140, 400, {1: 130}, None)
    assert newcomers(found, before) == {1: 30}


def test_without_bytes_per_process_all_growth_is_ours() -> None:
    for processes in (None, {1: None, 9007001: None}):
        before = Reading(used_bytes=110, processes={1: 100})
        found = split(Reading(used_bytes=560, processes=processes), before, OURS, everywhere)
        assert (found.foreign_bytes, found.listed_bytes, found.why) == (110, None, HIDDEN)


def test_reason_for_a_missing_list_is_passed_on() -> None:
    before = Reading(used_bytes=4, processes=None, why="Insufficient Permissions")
    assert split(Reading(used_bytes=9, processes={}), before, OURS, everywhere).why == "Insufficient Permissions"


def test_pids_of_another_namespace_are_not_other_processes() -> None:
    before = Reading(used_bytes=4, processes={})
    found = split(Reading(used_bytes=904, processes={9194301: 890}), before, OURS, nowhere)
    assert (found.foreign_bytes, found.why, newcomers(found, before)) == (4, ELSEWHERE, {})
    # A pid of our namespace is another process all the same.
    assert split(Reading(used_bytes=904, processes={4242: 890}), before, OURS, everywhere).others == {4242: 890}
    # And where ours are listed, a stranger is one.
    assert split(Reading(used_bytes=904, processes={9194301: 800, 9007001: 90}), before, OURS, nowhere).others == {9194301: 800}


def test_a_number_that_held_memory_before_is_not_ours() -> None:
    before = Reading(used_bytes=110, processes={9007001: 100})
    found = split(Reading(used_bytes=510, processes={9007001: 100, 9007002: 400}), before, OURS, everywhere)
    assert (found.foreign_bytes, found.listed_bytes, found.others) == (110, 400, {9007001: 100})


def test_in_a_namespace_of_its_own_one_unknown_number_makes_all_of_them_doubtful() -> None:
    before = Reading(used_bytes=4, processes={})
    now = Reading(used_bytes=904, processes={9194301: 800, 9007001: 90})
    found = split(now, before, OURS, lambda pid: pid in OURS, own_namespace=True)
    assert (found.foreign_bytes, found.why, newcomers(found, before)) == (4, ELSEWHERE, {})
    assert split(now, before, OURS, everywhere, own_namespace=True).others == {9194301: 800}


BYTES = st.integers(min_value=0, max_value=10**12)


@given(
    own=st.dictionaries(st.sampled_from([9007001, 9007002]), BYTES, min_size=1),
    others=st.dictionaries(st.integers(1, 50), BYTES),
    joined=st.dictionaries(st.integers(51, 99), BYTES),
    unbooked=BYTES,
)
def test_parts_add_up_for_any_processes(
    own: dict[int, int], others: dict[int, int], joined: dict[int, int], unbooked: int
) -> None:
    before = Reading(used_bytes=unbooked + sum(others.values()), processes=others)
    used = unbooked + sum(others.values()) + sum(joined.values()) + sum(own.values())
    found = split(Reading(used_bytes=used, processes={**others, **joined, **own}), before, OURS, everywhere)
    assert used - found.foreign_bytes == sum(own.values()) == found.listed_bytes
    assert sum(newcomers(found, before).values()) == sum(joined.values())
