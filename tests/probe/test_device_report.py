from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.measurement import DeviceMemory, TorchMemory
from autotune.probe import device_report
from autotune.probe.device_meter import DevicePeaks, Reading
from autotune.probe.gpu_set import Gpus
from autotune.probe.message_validation import RankResult
from tests.probe.nvml_playback import Playback

MIB = 2**20
UUID = "GPU-5c0f3e00-aaaa-bbbb-cccc-000000000000"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Gpus(1, 40960 * MIB, Path(sys.executable), library=Playback("two_a100"))


def peaks_of(**figures: Any) -> DevicePeaks:
    return DevicePeaks(before=Reading(used_bytes=0, processes={}), foreign_bytes=0, **figures)


def test_a_peak_between_two_samples_is_taken_from_the_rank(gpus: Gpus) -> None:
    peaks = peaks_of(
        peak_bytes=900,
        phase_peak_bytes={"backward": 900, "rollout": 500},
        listed_peak_bytes=880,
    )
    result = RankResult(peak_bytes=1000, phase_peak_bytes={"backward": 1000, "load": 100})
    (device,) = device_report.device_memories(gpus, {UUID: peaks}, {0: result})
    assert device.peak_bytes == 1000
    assert device.phase_peak_bytes == {"backward": 1000, "rollout": 500, "load": 100}
    assert (device.measured_by, device.why, device.processes_peak_bytes) == (
        "nvml-processes",
        None,
        880,
    )
    assert (device.index, device.uuid, device.name) == (0, UUID, "NVIDIA A100-SXM4-40GB")


def test_growth_of_others_invalidates_a_ranks_own_figure(gpus: Gpus) -> None:
    peaks = peaks_of(
        peak_bytes=900,
        listed_peak_bytes=880,
        newcomers={7: 300},
    )
    (device,) = device_report.device_memories(gpus, {UUID: peaks}, {0: RankResult(peak_bytes=1200)})
    assert device.peak_bytes == 900


def test_others_that_left_do_not_hide_what_torch_reserved(gpus: Gpus) -> None:
    """Without a list, memory of others that becomes free looks like memory that the probe did
    not take.
    """
    figures = TorchMemory(
        allocated_bytes=1,
        reserved_bytes=1500,
        retries=0,
        out_of_memory=0,
    )
    result = RankResult(
        peak_bytes=900,
        torch_reserved_bytes=1500,
        torch_by_phase={"backward": figures},
    )
    (device,) = device_report.device_memories(
        gpus, {UUID: peaks_of(peak_bytes=900, why="hidden")}, {0: result}
    )
    assert (device.peak_bytes, device.phase_peak_bytes) == (1500, {"backward": 1500})


def test_unusable_list_is_reported(gpus: Gpus) -> None:
    for peaks, why in (
        (peaks_of(peak_bytes=9, why="hidden"), "hidden"),
        (peaks_of(peak_bytes=9), device_report.UNLISTED),
    ):
        (device,) = device_report.device_memories(gpus, {UUID: peaks}, {})
        assert (device.measured_by, device.why, device.processes_peak_bytes) == (
            "nvml-device",
            why,
            None,
        )


def test_without_nvml_ranks_report_except_under_sleep_mode() -> None:
    blind = Gpus(
        2, MIB, Path(sys.executable), library=Playback("library_not_found"), variable="0,1"
    )
    results = {
        0: RankResult(peak_bytes=5, phase_peak_bytes={"load": 4}),
        1: RankResult(peak_bytes=7, torch_reserved_why="sleeps"),
    }
    first, second = device_report.device_memories(blind, {}, results)
    assert (first.peak_bytes, first.measured_by, first.others_bytes) == (5, "torch", None)
    assert first.why == "NVML: NVML Shared Library Not Found"
    assert second.peak_bytes is None and "sleep mode" in str(second.why)
    assert any("NVML was not in use" in caveat for caveat in device_report.caveats(blind))


def test_peak_of_a_load_is_included() -> None:
    def device(peak: int | None, **phases: int) -> DeviceMemory:
        return DeviceMemory(
            index=0,
            uuid=None,
            name=None,
            peak_bytes=peak,
            phase_peak_bytes=phases,
            measured_by="torch",
            processes_peak_bytes=peak,
        )

    (combined,) = device_report.higher_of_each([device(9, load=9)], [device(5, rollout=5, load=2)])
    assert (combined.peak_bytes, combined.processes_peak_bytes, combined.phase_peak_bytes) == (
        9,
        9,
        {"load": 9, "rollout": 5},
    )
    assert device_report.higher_of_each([], [device(5)]) == (device(5),)
    (unknown,) = device_report.higher_of_each([device(9)], [device(None)])
    assert unknown.peak_bytes is None, "the load's peak is not the run's"
    assert device_report.worst_peak([device(3), device(5)]) == 5
    assert device_report.worst_peak([device(3), device(None)]) is None
    assert device_report.worst_phases([device(1, load=3, score=0), device(1, load=5, sync=1)]) == {
        "load": 5,
        "sync": 1,
    }


def test_torchs_figures_by_phase_are_the_worst_ranks_and_the_counts_all_ranks() -> None:
    def rank(reserved: int | None, retries: int) -> RankResult:
        figures = TorchMemory(
            allocated_bytes=10 + retries,
            reserved_bytes=reserved,
            retries=retries,
            out_of_memory=1,
        )
        return RankResult(torch_by_phase={"backward": figures})

    assert device_report.torch_by_phase([rank(20, 1), rank(30, 2)]) == {
        "backward": TorchMemory(
            allocated_bytes=12,
            reserved_bytes=30,
            retries=3,
            out_of_memory=2,
        )
    }
    assert (
        device_report.torch_by_phase([rank(20, 1), rank(None, 2)])["backward"].reserved_bytes
        is None
    )
    assert device_report.torch_by_phase([RankResult()]) == {}


def test_processes_with_large_growth_are_named(gpus: Gpus) -> None:
    assert (
        device_report.taken_meanwhile(gpus, {UUID: peaks_of(newcomers={9004711: 255 * MIB})})
        is None
    )
    least = {UUID: peaks_of(newcomers={9004711: 128 * MIB, 9004712: 128 * MIB})}
    assert device_report.taken_meanwhile(gpus, least) is not None
    message = device_report.taken_meanwhile(
        gpus, {UUID: peaks_of(newcomers={9004711: 20480 * MIB})}
    )
    assert (
        message is not None
        and "GPU 0 was taken by others" in message
        and "pid 9004711): 20 GiB" in message
    )


def test_a_limit_below_the_card_is_torchs_alone(
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    limited = Gpus(1, 20480 * MIB, Path(sys.executable), library=Playback("two_a100"))
    for cards, is_limited in ((gpus, False), (limited, True)):
        is_stated = any("only torch's allocator" in line for line in device_report.caveats(cards))
        assert is_stated is is_limited


def test_rank_on_another_gpu_is_detected(gpus: Gpus) -> None:
    assert device_report.on_another_device(gpus, {0: RankResult(device_uuid=UUID)}) is None
    assert device_report.on_another_device(gpus, {0: RankResult()}) is None
    message = device_report.on_another_device(gpus, {0: RankResult(device_uuid="GPU-x")})
    assert message is not None and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in message


def test_known_processes_are_removed_from_torchs_error() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of"
        " which 1.00 GiB is free. Process 4242 has 41.00 GiB memory in use. Including non-PyTorch"
        " memory, this process has 37.00 GiB memory in use. Of the"
    )
    message = {
        "event": "failed",
        "rank": 0,
        "error": {"text": text, "chain": [{"type": "OutOfMemoryError", "text": text}]},
    }
    (cleaned,) = device_report.without_neighbours([message])
    assert (
        "4242" not in str(cleaned)
        and "this process has 37.00 GiB" in cleaned["error"]["chain"][0]["text"]
    )
    assert cleaned["rank"] == 0
