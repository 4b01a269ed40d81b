from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import ProbeError
from autotune.probe.gpu_set import Ballast, Gpus
from tests.probe.ballasts import SmallCards
from tests.probe.nvml_playback import Playback
from tests.probe.toys import gone

MIB = 2**20
WHOLE = 40960 * MIB


def gpus(library: Playback, count: int = 1, limit: int = WHOLE, **options: Any) -> Gpus:
    given = {"variable": None, "patience_seconds": 0.3, **options}
    return Gpus(count, limit, Path(sys.executable), library=library, **given)


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_memory_of_others_is_listed_and_reduces_the_limit() -> None:
    found = gpus(Playback("two_a100"), count=2)
    found.settle()
    first, second = found.slots
    assert (first.others_bytes, second.others_bytes) == (3080 * MIB, 0)
    assert len(first.others_in_words(found.nvml)) == 1 and "pid 9004711" in first.others_in_words(found.nvml)[0]
    assert found.effective_limit_bytes == (40960 - 3080) * MIB
    assert found.bound_by == "device"
    assert found.for_ranks()[0] == {"others_bytes": 3080 * MIB, "cap_bytes": None, "engine_share_scale": 1.0}
    found.close()


def test_gpus_of_the_ranks_are_those_visible_to_cuda() -> None:
    found = gpus(Playback("two_a100"), variable="GPU-5c0f3e01")
    assert [slot.visible[:12] for slot in found.slots] == ["GPU-5c0f3e01"]
    with pytest.raises(ProbeError, match="2 GPUs are needed, and CUDA_VISIBLE_DEVICES=1 leaves 1"):
        gpus(Playback("two_a100"), count=2, variable="1")


def test_memory_taken_between_probes_is_a_fault_with_the_process() -> None:
    library = Playback("newcomer")
    found = gpus(library)
    found.settle()
    library.at(3)
    with pytest.raises(ProbeError, match=r"GPU 0 is not as empty.*20 GiB more.*pid 9008080.*Autotune ends only processes"):
        found.settle()
    library.at(0)
    found.settle()


def test_vanished_process_is_ignored() -> None:
    found = gpus(Playback("vanishing_process"))
    found.settle()
    assert "pid 9194999" in found.slots[0].others_in_words(found.nvml)[0]


def test_a_gpu_that_is_lost_is_a_fault() -> None:
    library = Playback("lost")
    found = gpus(library)
    library.at(1)
    with pytest.raises(ProbeError, match=r"can't be read any more.*lost"):
        found.settle()


def test_a_limit_just_below_the_card_is_left_to_torchs_cap() -> None:
    found = gpus(Playback("mixed"), limit=143000 * MIB)
    found.settle()
    assert found.bound_by == "torch"
    assert found.for_ranks()[0]["cap_bytes"] == 143000 * MIB
    found.close()


def test_a_gpu_for_one_process_cannot_have_a_ballast() -> None:
    found = gpus(Playback("exclusive"), limit=WHOLE // 2, make_ballast=SmallCards(64))
    found.settle()
    assert found.bound_by == "torch"
    assert found.for_ranks()[0]["engine_share_scale"] == pytest.approx((20480 - 600) / (40960 - 600))


def test_ballast_holds_the_rest_and_the_engine_share_is_scaled() -> None:
    # The stand-in card has 64 MiB, of which a card of 640 MiB with 600 reserved leaves 40.
    cards = SmallCards(64)
    found = gpus(Playback("two_a100"), limit=640 * MIB, make_ballast=cards)
    try:
        found.settle()
        assert found.bound_by == "ballast"
        assert found.slots[0].held is not None and found.slots[0].held.free_bytes == 40 * MIB
        assert found.for_ranks()[0]["engine_share_scale"] == pytest.approx(40 / 64)
        assert found.for_ranks()[0]["cap_bytes"] is None
        found.check()
        found.settle()
        assert len(cards.made) == 1, "one ballast for all loads"
    finally:
        found.close()
    assert gone(*(ballast.pid for ballast in cards.made))
    found.close()


def test_context_of_a_ballast_is_not_memory_of_others() -> None:
    library, cards = Playback("newcomer"), SmallCards(64)

    def start(python: Path, device: str) -> Ballast:
        library.put(0, 404, [])  # the driver lists no process here, and 400 MiB are used that were not before
        return cards(python, device)

    found = gpus(library, limit=640 * MIB, make_ballast=start)
    try:
        found.settle()
        assert (found.slots[0].ballast_bytes, found.slots[0].others_bytes) == (424 * MIB, 0)
        assert found.for_ranks()[0]["others_bytes"] == 404 * MIB, "none of it is a rank's"
    finally:
        found.close()


def test_ended_ballast_voids_the_measurement_and_is_replaced() -> None:
    cards = SmallCards(64)
    found = gpus(Playback("two_a100"), limit=640 * MIB, make_ballast=cards)
    try:
        found.settle()
        os.kill(cards.made[0].pid, signal.SIGKILL)
        assert gone(cards.made[0].pid)
        with pytest.raises(ProbeError, match=r"ballast on GPU 0 ended.*void"):
            found.check()
        found.settle()
        found.check()
        assert len(cards.made) == 2
    finally:
        found.close()


@pytest.mark.parametrize("recording", ["library_not_found", "driver_mismatch"])
def test_without_nvml_the_ballast_reports_the_size(recording: str) -> None:
    cards = SmallCards(2048)
    found = gpus(Playback(recording), count=1, limit=2000 * MIB, make_ballast=cards)
    assert found.why_not is not None and found.why_not.startswith("NVML")
    assert found.meter(lambda: ()) is None
    found.settle()
    assert found.bound_by == "torch", "48 MiB are less than a context takes"
    assert found.for_ranks() == [{"others_bytes": None, "cap_bytes": 2000 * MIB, "engine_share_scale": 2000 / 2048}]
    found.settle()
    assert len(cards.made) == 1, "the size is requested once"
    found.close()
    assert gone(*(ballast.pid for ballast in cards.made))


def test_without_nvml_gpus_are_named_by_the_variable() -> None:
    found = gpus(Playback("library_not_found"), count=2, variable="3,1")
    assert [slot.visible for slot in found.slots] == ["3", "1"]
    assert [slot.visible for slot in gpus(Playback("library_not_found"), count=2).slots] == ["0", "1"]


def test_without_nvml_a_ballast_holds_memory() -> None:
    cards = SmallCards(1200)
    found = gpus(Playback("library_not_found"), limit=1100 * MIB, make_ballast=cards)
    found.settle()
    assert found.bound_by == "torch"
    found.close()
    found = gpus(Playback("library_not_found"), limit=100 * MIB, make_ballast=cards)
    try:
        found.settle()
        assert (found.bound_by, found.slots[0].others_bytes) == ("ballast", None)
        assert found.for_ranks()[0]["others_bytes"] == 1100 * MIB
        assert found.for_ranks()[0]["engine_share_scale"] == pytest.approx(100 / 1200)
    finally:
        found.close()
