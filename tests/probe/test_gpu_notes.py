from __future__ import annotations

import pytest

from autotune.core.job import Hardware
from autotune.probe.device_report import gpu_notes
from tests.probe.nvml_playback import Playback

MIB = 2**20
A100 = Hardware(kind="cuda", name="A100-40G", count=1, memory_bytes=40960 * MIB, here=True)


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
    others, held = gpu_notes(A100, 16384 * MIB, library=Playback("two_a100"))
    assert "the limit there" not in others, "there is enough beside them"
    assert held.startswith("all but 16 GiB of each A100-40G is held back") and "speeds are those of A100-40G" in held
    (alone,) = gpu_notes(A100, 16384 * MIB, library=Playback("exclusive"))
    assert "one process at a time" in alone


def test_no_notes_without_a_reason() -> None:
    assert gpu_notes(A100, A100.memory_bytes, library=Playback("newcomer")) == ()
    elsewhere = Hardware(kind="cuda", name="A100-40G", count=1, memory_bytes=1, here=False)
    assert gpu_notes(elsewhere, 1, library=Playback("two_a100")) == ()
    assert gpu_notes(Hardware(kind="cpu", name="cpu", count=1, memory_bytes=1, here=True), 1) == ()


def test_missing_nvml_and_a_wrong_choice_are_noted() -> None:
    (note,) = gpu_notes(A100, A100.memory_bytes, library=Playback("library_not_found"))
    assert "NVML is not in use (NVML: NVML Shared Library Not Found)" in note
    two = Hardware(kind="cuda", name="A100-40G", count=2, memory_bytes=40960 * MIB, here=True)
    (wrong,) = gpu_notes(two, two.memory_bytes, library=Playback("newcomer"))
    assert "2 GPUs are needed" in wrong
    library = Playback("lost")
    library.at(1)
    assert "lost" in gpu_notes(A100, A100.memory_bytes, library=library)[0]
