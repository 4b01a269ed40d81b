from __future__ import annotations

import pytest

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.machine import hardware_detection
from autotune.machine.nvml import Device, devices_here, visible
from tests.probe.nvml_playback import Playback

MIB = 2**20
A, B, C = (Device(name="X", memory_bytes=1, index=number, uuid=f"GPU-{letter}00") for number, letter in enumerate("abc"))


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, (A, B, C)), ("", ()), ("-1", ()), ("2,0", (C, A)), ("GPU-b", (B,)), ("GPU-b00,0", (B, A)), ("0,7,1", (A,)),
        ("GPU-", ()), ("0, 1", (A, B)), ("NoDevFiles", ()),
    ],
)  # fmt: skip
def test_cuda_shows_what_its_variable_names_up_to_the_first_that_is_not_there(
    variable: str | None, seen: tuple[Device, ...]
) -> None:
    assert visible((A, B, C), variable) == seen


def test_devices_have_all_figures_of_the_driver() -> None:
    first, second = devices_here(Playback("two_a100"), "1,0")
    assert (first.index, second.index) == (1, 0)
    assert (first.driver_version, first.compute_capability, first.reserved_bytes) == ("550.54.15", "8.0", 600 * MIB)
    found = hardware_detection.hardware("local", devices_here(Playback("two_a100"), "1,0"))
    assert (found.name, found.count, found.memory_bytes, found.here) == ("A100-40G", 2, 40960 * MIB, True)


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
    with pytest.raises(BadInput, match=r"one slice only.*CUDA_VISIBLE_DEVICES=MIG-11111111\S+ .*MIG-22222222"):
        hardware_detection.hardware("local", slices)
    one = devices_here(Playback("mig"), "MIG-2222")
    found = hardware_detection.hardware("local", one)
    assert (found.name, found.count, found.memory_bytes) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 1, 19968 * MIB)
    assert hardware_detection.recognise(Device(name="NVIDIA A100-SXM4-40GB MIG 7g.40gb", memory_bytes=40192 * MIB)) is None


def test_different_gpus_come_with_the_choices() -> None:
    here = devices_here(Playback("mixed"), "0,1,2")
    with pytest.raises(BadInput, match=r"CUDA_VISIBLE_DEVICES=0 \(NVIDIA H200\) or CUDA_VISIBLE_DEVICES=1,2 \(NVIDIA A100"):
        hardware_detection.hardware("local", here)
    with pytest.raises(BadInput, match=r"would get other GPUs here \(NVIDIA H200.*CUDA_VISIBLE_DEVICES=1,2"):
        hardware_detection.hardware("2xA100-40G", here)
    assert hardware_detection.hardware("2xA100-40G", here[1:]).here
    assert hardware_detection.hardware("H200", here).here
