"""GPUs of an executor: their limit, the ballast's size, released memory, notes before a search."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.engine_share import share_scale, usable_bytes
from autotune.core.errors import ProbeError
from autotune.core.job import Hardware
from autotune.probe.ballast import (
    MIN_BALLAST_BYTES,
    RESIDUE_BYTES,
    Ballast,
    needs_ballast,
    wait_until_released,
)
from autotune.probe.device_report import gpu_notes
from autotune.probe.gpu_set import Gpus
from tests.probe.ballasts import SmallCards
from tests.probe.nvml_playback import Playback
from tests.probe.toys import gone

MIB = 2**20
WHOLE = 40960 * MIB


def gpus(library: Playback, count: int = 1, limit: int = WHOLE, **options: Any) -> Gpus:
    gpu_options = {"variable": None, "patience_seconds": 0.3, **options}
    return Gpus(count, limit, Path(sys.executable), library=library, **gpu_options)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_memory_of_others_is_listed_and_reduces_the_limit() -> None:
    gpu_set = gpus(Playback("two_a100"), count=2)
    gpu_set.settle()
    first, second = gpu_set.slots
    assert (first.others_bytes, second.others_bytes) == (3080 * MIB, 0)
    assert (
        len(first.others_in_words(gpu_set.nvml)) == 1
        and "pid 9004711" in first.others_in_words(gpu_set.nvml)[0]
    )
    assert gpu_set.effective_limit_bytes == (40960 - 3080) * MIB
    assert gpu_set.bound_by == "device"
    assert gpu_set.for_ranks()[0] == {
        "others_bytes": 3080 * MIB,
        "cap_bytes": None,
        "engine_share_scale": 1.0,
    }
    gpu_set.close()


def test_gpus_of_the_ranks_are_those_visible_to_cuda() -> None:
    gpu_set = gpus(Playback("two_a100"), variable="GPU-5c0f3e01")
    assert [slot.visible[:12] for slot in gpu_set.slots] == ["GPU-5c0f3e01"]
    with pytest.raises(
        ProbeError, match="A probe needs 2 GPUs, and CUDA_VISIBLE_DEVICES=1 leaves 1"
    ):
        gpus(Playback("two_a100"), count=2, variable="1")


def test_memory_taken_between_probes_is_a_fault_with_the_process() -> None:
    library = Playback("newcomer")
    gpu_set = gpus(library)
    gpu_set.settle()
    library.at(3)
    with pytest.raises(
        ProbeError,
        match=r"GPU 0 is not as empty.*20 GiB more.*pid 9008080.*Autotune ends only processes",
    ):
        gpu_set.settle()
    library.at(0)
    gpu_set.settle()


def test_vanished_process_is_ignored() -> None:
    gpu_set = gpus(Playback("vanishing_process"))
    gpu_set.settle()
    assert "pid 9194999" in gpu_set.slots[0].others_in_words(gpu_set.nvml)[0]


def test_a_gpu_that_is_lost_is_a_fault() -> None:
    library = Playback("lost")
    gpu_set = gpus(library)
    library.at(1)
    with pytest.raises(ProbeError, match=r"can't be read any more.*lost"):
        gpu_set.settle()


def test_a_limit_just_below_the_card_is_left_to_torchs_cap() -> None:
    gpu_set = gpus(Playback("mixed"), limit=143000 * MIB)
    gpu_set.settle()
    assert gpu_set.bound_by == "torch"
    assert gpu_set.for_ranks()[0]["cap_bytes"] == 143000 * MIB
    gpu_set.close()


def test_a_gpu_for_one_process_cannot_have_a_ballast() -> None:
    gpu_set = gpus(Playback("exclusive"), limit=WHOLE // 2, make_ballast=SmallCards(64))
    gpu_set.settle()
    assert gpu_set.bound_by == "torch"
    assert gpu_set.for_ranks()[0]["engine_share_scale"] == pytest.approx(
        (20480 - 600) / (40960 - 600)
    )


def test_ballast_holds_the_rest_and_the_engine_share_is_scaled() -> None:
    # The stand-in card has 64 MiB, of which a card of 640 MiB with 600 reserved leaves 40.
    cards = SmallCards(64)
    gpu_set = gpus(Playback("two_a100"), limit=640 * MIB, make_ballast=cards)
    try:
        gpu_set.settle()
        assert gpu_set.bound_by == "ballast"
        assert gpu_set.slots[0].hold is not None and gpu_set.slots[0].hold.free_bytes == 40 * MIB
        assert gpu_set.for_ranks()[0]["engine_share_scale"] == pytest.approx(40 / 64)
        assert gpu_set.for_ranks()[0]["cap_bytes"] is None
        gpu_set.check()
        gpu_set.settle()
        assert len(cards.made) == 1, "one ballast for all loads"
    finally:
        gpu_set.close()
    assert gone(*(ballast.pid for ballast in cards.made))
    gpu_set.close()


def test_context_of_a_ballast_is_not_memory_of_others() -> None:
    library, cards = Playback("newcomer"), SmallCards(64)

    def start(python: Path, device: str) -> Ballast:
        library.put(
            0, 404, []
        )  # the driver lists no process here, and 400 MiB are used that were not before
        return cards(python, device)

    gpu_set = gpus(library, limit=640 * MIB, make_ballast=start)
    try:
        gpu_set.settle()
        assert (gpu_set.slots[0].ballast_bytes, gpu_set.slots[0].others_bytes) == (424 * MIB, 0)
        assert gpu_set.for_ranks()[0]["others_bytes"] == 404 * MIB, "none of it is a rank's"
    finally:
        gpu_set.close()


def test_ended_ballast_voids_the_measurement_and_is_replaced() -> None:
    cards = SmallCards(64)
    gpu_set = gpus(Playback("two_a100"), limit=640 * MIB, make_ballast=cards)
    try:
        gpu_set.settle()
        os.kill(cards.made[0].pid, signal.SIGKILL)
        assert gone(cards.made[0].pid)
        with pytest.raises(ProbeError, match=r"ballast on GPU 0 ended.*void"):
            gpu_set.check()
        gpu_set.settle()
        gpu_set.check()
        assert len(cards.made) == 2
    finally:
        gpu_set.close()


@pytest.mark.parametrize("recording", ["library_not_found", "driver_mismatch"])
def test_without_nvml_the_ballast_reports_the_size(recording: str) -> None:
    cards = SmallCards(2048)
    gpu_set = gpus(
        Playback(recording),
        count=1,
        limit=2000 * MIB,
        make_ballast=cards,
    )
    assert gpu_set.why_not is not None and gpu_set.why_not.startswith("NVML")
    assert gpu_set.meter(lambda: ()) is None
    gpu_set.settle()
    assert gpu_set.bound_by == "torch", "48 MiB are less than a context takes"
    assert gpu_set.for_ranks() == [
        {"others_bytes": None, "cap_bytes": 2000 * MIB, "engine_share_scale": 2000 / 2048}
    ]
    gpu_set.settle()
    assert len(cards.made) == 1, "the size is requested once"
    gpu_set.close()
    assert gone(*(ballast.pid for ballast in cards.made))


def test_without_nvml_gpus_are_named_by_the_variable() -> None:
    gpu_set = gpus(Playback("library_not_found"), count=2, variable="3,1")
    assert [slot.visible for slot in gpu_set.slots] == ["3", "1"]
    assert [slot.visible for slot in gpus(Playback("library_not_found"), count=2).slots] == [
        "0",
        "1",
    ]


def test_without_nvml_a_ballast_holds_memory() -> None:
    cards = SmallCards(1200)
    gpu_set = gpus(Playback("library_not_found"), limit=1100 * MIB, make_ballast=cards)
    gpu_set.settle()
    assert gpu_set.bound_by == "torch"
    gpu_set.close()
    gpu_set = gpus(Playback("library_not_found"), limit=100 * MIB, make_ballast=cards)
    try:
        gpu_set.settle()
        assert (gpu_set.bound_by, gpu_set.slots[0].others_bytes) == ("ballast", None)
        assert gpu_set.for_ranks()[0]["others_bytes"] == 1100 * MIB
        assert gpu_set.for_ranks()[0]["engine_share_scale"] == pytest.approx(100 / 1200)
    finally:
        gpu_set.close()


GIB = 2**30


def test_a_third_of_a_small_card_is_less_of_a_large_one() -> None:
    assert 0.3 * share_scale(38 * GIB, 80 * GIB) == pytest.approx(0.1425)
    assert share_scale(80 * GIB, 80 * GIB) == 1.0
    assert share_scale(90 * GIB, 80 * GIB) == 1.0, (
        "an engine's share of more than there is would be refused"
    )
    with pytest.raises(ValueError, match="no shares"):
        share_scale(1, 0)


def test_drivers_keep_their_part_of_the_small_card_too() -> None:
    assert usable_bytes(40 * GIB, GIB // 2) == 39.5 * GIB
    assert usable_bytes(40 * GIB, None) == 40 * GIB
    assert usable_bytes(GIB // 4, GIB // 2) == 0


def test_a_difference_smaller_than_a_context_needs_no_ballast() -> None:
    assert not needs_ballast(80 * GIB, 80 * GIB)
    assert not needs_ballast(80 * GIB - MIN_BALLAST_BYTES + 1, 80 * GIB)
    assert needs_ballast(80 * GIB - MIN_BALLAST_BYTES, 80 * GIB)


@given(
    share=st.floats(0.01, 1.0),
    total=st.integers(2 * GIB, 300 * GIB),
    fraction=st.floats(0.05, 1.0),
    reserved=st.integers(0, GIB),
)
def test_the_engine_gets_the_same_bytes_as_on_the_small_card(
    share: float,
    total: int,
    fraction: float,
    reserved: int,
) -> None:
    usable = usable_bytes(int((total + reserved) * fraction), reserved)
    if usable == 0:
        return
    # vLLM takes its share of all that the device shows; on the small card that would be `usable`.
    engine_bytes, expected = share * share_scale(usable, total) * total, share * min(usable, total)
    assert engine_bytes == pytest.approx(expected, rel=1e-9)
    assert 0 < share * share_scale(usable, total) <= share


class Hands:
    """Clock that advances by sleeping, and a device that releases memory on a schedule."""

    def __init__(self, *used: int) -> None:
        self.time, self.used = 0.0, list(used)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def read(self) -> int:
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]


def waited(*used: int, base: int = 3 * GIB, patience: float = 30.0) -> tuple[int, float]:
    hands = Hands(*used)
    return wait_until_released(
        hands.read,
        base,
        patience_seconds=patience,
        now=hands.now,
        sleep=hands.sleep,
    ), hands.time


def test_idle_device_takes_two_readings() -> None:
    above, seconds = waited(3 * GIB)
    assert above == 0 and 0 < seconds < 1


def test_wait_until_memory_is_released_and_stable() -> None:
    above, seconds = waited(30 * GIB, 20 * GIB, 10 * GIB, 3 * GIB + RESIDUE_BYTES, 3 * GIB)
    assert above == 0 and seconds > 0.3


def test_wait_while_another_process_releases() -> None:
    above, seconds = waited(3 * GIB, 2 * GIB, 1 * GIB, 1 * GIB)
    assert above == 0 and seconds > 0.25


def test_remaining_memory_is_returned_at_the_deadline() -> None:
    above, seconds = waited(5 * GIB, patience=2.0)
    assert above == 2 * GIB and 2.0 <= seconds < 2.3


A100 = Hardware(
    kind="cuda",
    name="A100-40G",
    count=1,
    memory_bytes=40960 * MIB,
    here=True,
)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_other_processes_are_listed_with_the_remaining_memory() -> None:
    (note,) = gpu_notes(A100, A100.memory_bytes, library=Playback("two_a100"))
    assert (
        note.startswith("others hold 3.01 GiB of GPU 0 (")
        and "pid 9004711): 3 GiB" in note
        and "the limit there is 37 GiB" in note
    )


def test_smaller_card_on_a_larger_one_is_noted() -> None:
    others_note, held_note = gpu_notes(A100, 16384 * MIB, library=Playback("two_a100"))
    assert "the limit there" not in others_note, "there is enough beside them"
    assert (
        held_note.startswith("all but 16 GiB of each A100-40G is held back")
        and "speeds are those of A100-40G" in held_note
    )
    (exclusive_note,) = gpu_notes(A100, 16384 * MIB, library=Playback("exclusive"))
    assert "one process at a time" in exclusive_note


def test_no_notes_without_a_reason() -> None:
    assert gpu_notes(A100, A100.memory_bytes, library=Playback("newcomer")) == ()
    elsewhere = Hardware(
        kind="cuda",
        name="A100-40G",
        count=1,
        memory_bytes=1,
        here=False,
    )
    assert gpu_notes(elsewhere, 1, library=Playback("two_a100")) == ()
    assert (
        gpu_notes(
            Hardware(
                kind="cpu",
                name="cpu",
                count=1,
                memory_bytes=1,
                here=True,
            ),
            1,
        )
        == ()
    )


def test_missing_nvml_and_a_wrong_choice_are_noted() -> None:
    (note,) = gpu_notes(A100, A100.memory_bytes, library=Playback("library_not_found"))
    assert "NVML is not in use (NVML: NVML Shared Library Not Found)" in note
    two = Hardware(
        kind="cuda",
        name="A100-40G",
        count=2,
        memory_bytes=40960 * MIB,
        here=True,
    )
    (wrong,) = gpu_notes(two, two.memory_bytes, library=Playback("newcomer"))
    assert "needs 2 GPUs" in wrong
    library = Playback("lost")
    library.at(1)
    assert "lost" in gpu_notes(A100, A100.memory_bytes, library=library)[0]
