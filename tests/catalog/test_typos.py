"""A model's name with a typo is answered with the names that were meant, also as a hub id."""

from __future__ import annotations

import pytest

from autotune.catalog.model_lookup import find_model
from autotune.core.errors import BadInput
from autotune.machine.hardware_detection import hardware


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen2.5-7BB", "Qwen2.5-7B"),
        ("LAMA-3.1-8B", "Llama-3.1-8B"),
        ("Qwen/Qwen2.5-7BB", "Qwen/Qwen2.5-7B"),
        ("meta-llama/Lama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_the_nearest_name_comes_first(
    typed: str,
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput) as refusal:
        find_model(typed)
    assert refusal.value.way_out.startswith(f"Did you mean '{meant}'")


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("NVIDIA L20", "L20"),
        ("NVIDIA H20", "H20"),
        ("8xL20", "8xL20"),
        ("H20x8", "8xH20"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A800-SXM4-80GB", "A800-80G"),
        ("NVIDIA H800", "H800"),
    ],
)
def test_names_as_the_driver_prints_them(typed: str, known: str) -> None:
    assert str(hardware(typed, here=())) == known
