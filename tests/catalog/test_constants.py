"""The catalogue's constants, and the estimates for a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.catalog import communication, constants, context, cublas_workspace, estimate
from autotune.core.units import MIB
from autotune.machine.hardware_detection import gpu_named
from tests.estimate.synthetic import A100

ROOT = Path(__file__).resolve().parents[2]


def test_every_constant_has_its_figures_in_order_a_reason_and_a_public_source() -> None:
    for constant in constants().values():
        assert constant.low <= constant.value <= constant.high, constant.name
        assert constant.why.strip() and constant.unit, constant.name
        assert constant.sources, constant.name
        for source in constant.sources:
            is_public = source.startswith("https://")
            assert is_public or (ROOT / source).is_file(), constant.name


def test_a_context_grows_with_the_multiprocessors() -> None:
    """MiB of a bare context: each public figure behind the constant is inside its interval."""
    for multiprocessors, measured_mib in ((34, 107), (82, 256), (142, 426), (188, 555)):
        bare = estimate("context_mib_per_multiprocessor", MIB * multiprocessors)
        assert bare.low - MIB <= measured_mib * MIB <= bare.high + MIB, multiprocessors


def test_device_memory_above_reserved_on_an_h200_is_inside() -> None:
    """764 to 767 MiB in the points of SFT of the first measurement."""
    estimate = context(gpu_named("H200"))
    assert estimate.low < 764 * MIB and estimate.high > 767 * MIB
    assert estimate.value == pytest.approx(765 * MIB, abs=2 * MIB)


def test_a_context_of_an_unknown_gpu_is_wider_than_of_a_known_one() -> None:
    a100, unknown = context(A100), context(None)
    assert unknown.high - unknown.low > a100.high - a100.low
    assert unknown.low < a100.value < unknown.high


def test_device_memory_above_reserved_on_an_a100_is_inside() -> None:
    """0.51 GiB in most of the runs that the constant cites, 0.3 to 0.9 in others."""
    estimate = context(A100)
    assert estimate.low <= 0.4 * 1024 * MIB and estimate.high >= 0.9 * 1024 * MIB
    assert estimate.value == pytest.approx(0.51 * 1024 * MIB, rel=0.02)


@pytest.mark.parametrize(
    ("capability", "kib"),
    [("7.5", 8320), ("8.0", 8320), ("8.9", 8320), ("9.0", 32768), ("12.0", 32768), (None, 8320)],
)
def test_cublas_workspaces(capability: str | None, kib: int) -> None:
    assert cublas_workspace(dataclasses.replace(A100, compute_capability=capability)) == kib * 1024


def test_one_rank_has_no_buffers_and_more_links_have_more() -> None:
    assert communication(A100, 1).high == 0
    pcie = dataclasses.replace(A100, link="pcie")
    assert (
        communication(pcie, 2).value < communication(A100, 2).value < communication(A100, 4).value
    )
    assert communication(A100, 2, count=2).value == 2 * communication(A100, 2).value
    unknown = communication(dataclasses.replace(A100, link=None), 2)
    assert unknown.low == communication(pcie, 2).low and unknown.high == communication(A100, 2).high
