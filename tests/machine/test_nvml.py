"""GPUs of this machine, played back from recordings of NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.machine import hardware_detection
from autotune.machine.nvml import (
    Device,
    GpuLost,
    Nvml,
    NvmlNotSupported,
    NvmlUnavailable,
    devices_here,
    visible,
)
from tests.probe.nvml_playback import Playback

MIB = 2**20


def test_two_gpus_and_their_processes() -> None:
    nvml = Nvml.open(Playback("two_a100"))
    first, second = nvml.cards()
    assert (first.index, first.name, first.compute_capability, first.slice_of) == (
        0,
        "NVIDIA A100-SXM4-40GB",
        "8.0",
        None,
    )
    assert (first.memory_bytes, first.reserved_bytes) == (40960 * MIB, 600 * MIB)
    assert nvml.driver_version() == "550.54.15"
    assert nvml.used_bytes(first.uuid) == 3080 * MIB
    assert nvml.processes(first.uuid) == {9004711: 3072 * MIB}
    assert nvml.processes(second.uuid) == {}
    assert nvml.process_name(9004711) == "/usr/bin/python3"


def test_the_real_library_reports_no_driver_here() -> None:
    if Path("/proc/driver/nvidia").exists():
        assert Nvml.open().cards()
        return
    with pytest.raises(NvmlUnavailable, match="NVML Shared Library Not Found") as caught:
        Nvml.open()
    assert caught.value.absent


@pytest.mark.parametrize(
    ("recording", "why", "absent"),
    [
        ("library_not_found", "Shared Library Not Found", True),
        ("driver_mismatch", "version mismatch", False),
    ],
)
def test_reasons_for_nvml_unavailable(
    recording: str,
    why: str,
    absent: bool,
) -> None:
    with pytest.raises(NvmlUnavailable, match=why) as caught:
        Nvml.open(Playback(recording))
    assert caught.value.absent is absent


def test_a_cut_gpu_shows_as_its_slices() -> None:
    nvml = Nvml.open(Playback("mig"))
    slices = nvml.cards()
    assert [device.uuid[:12] for device in slices] == ["MIG-11111111", "MIG-22222222"]
    assert all(
        device.slice_of == "GPU-5c0f3e00-aaaa-bbbb-cccc-000000000000"
        and device.memory_bytes == 19968 * MIB
        for device in slices
    )
    assert nvml.used_bytes(slices[0].uuid) == 50 * MIB


def test_unreported_bytes_are_none() -> None:
    library = Playback("no_process_memory")
    nvml = Nvml.open(library)
    library.at(1)
    assert list(nvml.processes(nvml.cards()[0].uuid).values()) == [None, None]


def test_missing_permissions_are_reported_and_not_guessed() -> None:
    nvml = Nvml.open(Playback("no_permission"))
    uuid = nvml.cards()[0].uuid
    assert nvml.used_bytes(uuid) == 4 * MIB
    with pytest.raises(NvmlNotSupported, match="Insufficient Permissions"):
        nvml.processes(uuid)


def test_a_lost_gpu_and_a_vanished_process() -> None:
    library = Playback("lost")
    nvml = Nvml.open(library)
    uuid = nvml.cards()[0].uuid
    library.at(1)
    with pytest.raises(GpuLost, match="lost"):
        nvml.used_bytes(uuid)
    with pytest.raises(NvmlNotSupported, match="Not Found"):
        Nvml.open(Playback("vanishing_process")).process_name(9194999)


def test_an_old_driver_has_one_kind_of_figures() -> None:
    nvml = Nvml.open(Playback("old_driver"))
    card = nvml.cards()[0]
    assert card.reserved_bytes is None
    assert nvml.used_bytes(card.uuid) == 604 * MIB


def test_a_gpu_for_one_process_is_known() -> None:
    for recording, is_exclusive in (("exclusive", True), ("two_a100", False)):
        nvml = Nvml.open(Playback(recording))
        assert nvml.takes_one_process(nvml.cards()[0].uuid) is is_exclusive


def test_the_connection_is_closed() -> None:
    library = Playback("two_a100")
    Nvml.open(library).close()
    assert library.asked == ["shutdown"]


A, B, C = (
    Device(
        name="X",
        memory_bytes=1,
        index=number,
        uuid=f"GPU-{letter}00",
    )
    for number, letter in enumerate("abc")
)


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        (None, (A, B, C)),
        ("", ()),
        ("-1", ()),
        ("2,0", (C, A)),
        ("GPU-b", (B,)),
        ("GPU-b00,0", (B, A)),
        ("0,7,1", (A,)),
        ("GPU-", ()),
        ("0, 1", (A, B)),
        ("NoDevFiles", ()),
    ],
)
def test_cuda_shows_what_its_variable_names_up_to_the_first_that_is_not_there(
    variable: str | None, devices: tuple[Device, ...]
) -> None:
    assert visible((A, B, C), variable) == devices


def test_devices_have_all_figures_of_the_driver() -> None:
    first, second = devices_here(Playback("two_a100"), "1,0")
    assert (first.index, second.index) == (1, 0)
    assert (first.driver_version, first.compute_capability, first.reserved_bytes) == (
        "550.54.15",
        "8.0",
        600 * MIB,
    )
    recognised = hardware_detection.hardware("local", devices_here(Playback("two_a100"), "1,0"))
    assert (recognised.name, recognised.count, recognised.memory_bytes, recognised.here) == (
        "A100-40G",
        2,
        40960 * MIB,
        True,
    )


def test_a_refusing_driver_is_an_error_and_not_a_machine_without_gpus() -> None:
    with pytest.raises(HardwareNotHere, match=r"version mismatch.*--gpus cpu"):
        devices_here(Playback("driver_mismatch"))
    library = Playback("lost")
    library.at(1)
    with pytest.raises(HardwareNotHere, match="GPU is lost"):
        devices_here(library)


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert devices_here(Playback("library_not_found")) == ()


def test_slices_are_named_and_one_must_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slices = devices_here(Playback("mig"))
    with pytest.raises(
        BadInput, match=r"one slice only.*CUDA_VISIBLE_DEVICES=MIG-11111111\S+ .*MIG-22222222"
    ):
        hardware_detection.hardware("local", slices)
    sliced = devices_here(Playback("mig"), "MIG-2222")
    recognised = hardware_detection.hardware("local", sliced)
    assert (recognised.name, recognised.count, recognised.memory_bytes) == (
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        1,
        19968 * MIB,
    )
    assert (
        hardware_detection.recognise(
            Device(name="NVIDIA A100-SXM4-40GB MIG 7g.40gb", memory_bytes=40192 * MIB)
        )
        is None
    )


def test_different_gpus_come_with_the_choices() -> None:
    devices = devices_here(Playback("mixed"), "0,1,2")
    with pytest.raises(
        BadInput,
        match=r"CUDA_VISIBLE_DEVICES=0 \(NVIDIA H200\) or CUDA_VISIBLE_DEVICES=1,2 \(NVIDIA A100",
    ):
        hardware_detection.hardware("local", devices)
    with pytest.raises(
        BadInput, match=r"would get other GPUs here \(NVIDIA H200.*CUDA_VISIBLE_DEVICES=1,2"
    ):
        hardware_detection.hardware("2xA100-40G", devices)
    assert hardware_detection.hardware("2xA100-40G", devices[1:]).here
    assert hardware_detection.hardware("H200", devices).here
