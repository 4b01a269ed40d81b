"""Known traps, present and absent, in folders like those that pip leaves, read by a real
interpreter.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autotune.core.units import MIB
from autotune.failures.environment_traps import (
    EnvironmentFacts,
    active_traps,
    environment_facts,
    traps,
)

Packages = dict[str, str]

# name: (packages, variables) where it is there, and where it is not.
CASES: dict[str, tuple[tuple[Packages, dict[str, str]], tuple[Packages, dict[str, str]]]] = {
    "sleep_mode_with_expandable_segments": (
        (
            {"vllm": "0.20.0"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        ({"vllm": "0.20.1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "allocator_setting_that_vllm_does_not_see": (
        ({"vllm": "0.26.0"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"vllm": "0.26.0"},
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
        ),
    ),
    "allocator_setting_ignored": (
        ({"torch": "2.9.1+cu128"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"torch": "2.10.0"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "allocator_setting_of_an_old_name": (
        ({"torch": "2.9.0"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"torch": "2.8.0"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    ),
    "standby_with_expandable_segments": (
        (
            {"unsloth": "2026.10.1"},
            {"UNSLOTH_VLLM_STANDBY": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
        (
            {"unsloth": "2026.10.1"},
            {"UNSLOTH_VLLM_STANDBY": "0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
    ),
    "standby_with_vllm_0_10": (
        ({"unsloth": "2025.10.1", "vllm": "0.10.2"}, {"UNSLOTH_VLLM_STANDBY": "1"}),
        ({"unsloth": "2025.10.1", "vllm": "0.11.0"}, {"UNSLOTH_VLLM_STANDBY": "1"}),
    ),
    "torchvision_of_another_torch": (
        ({"torch": "2.6.0", "torchvision": "0.23.0"}, {}),
        ({"torch": "2.8.0+cu126", "torchvision": "0.23.0+cu126"}, {}),
    ),
    "torchvision_of_another_build": (
        ({"torch": "2.9.0+cpu", "torchvision": "0.24.0"}, {}),
        ({"torch": "2.9.0+cpu", "torchvision": "0.24.0+cpu"}, {}),
    ),
    "numpy_2_with_old_torch": (
        ({"torch": "2.2.2", "numpy": "2.0.1"}, {}),
        ({"torch": "2.3.0", "numpy": "2.0.1"}, {}),
    ),
    "checkpointing_under_fsdp": (
        ({"transformers": "4.47.0", "accelerate": "1.1.1"}, {}),
        ({"transformers": "4.47.1", "accelerate": "1.1.1"}, {}),
    ),
    "gradient_accumulation_4_46": (
        ({"transformers": "4.46.0"}, {}),
        ({"transformers": "4.46.1"}, {}),
    ),
    "gradient_accumulation_4_48": (
        ({"transformers": "4.48.2"}, {}),
        ({"transformers": "4.48.3"}, {}),
    ),
    "lora_under_fsdp": (
        ({"transformers": "4.54.0", "peft": "0.16.0"}, {}),
        ({"transformers": "4.55.0", "peft": "0.16.0"}, {}),
    ),
    "verl_adapter_with_peft_0_21": (
        ({"verl": "0.9.1", "peft": "0.21.2"}, {}),
        ({"verl": "0.9.1", "peft": "0.20.0"}, {}),
    ),
    "expandable_segments_with_vllm_0_11": (
        ({"vllm": "0.11.0"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"vllm": "0.12.0"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "vllm_that_trl_does_not_know": (
        ({"trl": "1.16.0", "vllm": "0.33.0"}, {}),
        ({"trl": "1.16.0", "vllm": "0.31.0"}, {}),
    ),
    "requirement_not_met": (
        ({"ms_swift": "4.6.0", "trl": "1.16.0"}, {}),
        ({"ms_swift": "4.6.0", "trl": "0.24.0"}, {}),
    ),
    "launch_blocking": (({}, {"CUDA_LAUNCH_BLOCKING": "1"}), ({}, {"CUDA_LAUNCH_BLOCKING": "0"})),
    "allocator_cache_off": (({}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}), ({}, {})),
    "peer_to_peer_off": (({}, {"NCCL_P2P_DISABLE": "1"}), ({}, {"NCCL_P2P_DISABLE": "0"})),
    "infiniband_off": (({}, {"NCCL_IB_DISABLE": "1"}), ({}, {})),
    "tokenizers_parallelism": (
        ({}, {"TOKENIZERS_PARALLELISM": "true"}),
        ({}, {"TOKENIZERS_PARALLELISM": "false"}),
    ),
    "no_gpu_is_visible": (
        ({}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ),
    "lengths_beyond_the_model": (({}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}), ({}, {})),
    "ray_memory_monitor_off": (
        ({"ray": "2.60.0"}, {"RAY_memory_monitor_refresh_ms": "0"}),
        ({"ray": "2.60.0"}, {"RAY_memory_monitor_refresh_ms": "250"}),
    ),
}
REQUIRES = {
    "trl": ['vllm<=0.31.0,>=0.22.0; extra == "vllm"'],
    "ms_swift": ["trl<1.0,>=0.15", "torch>=2.0"],
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without any variable that a trap is about."""
    for trap in traps():
        for name in (*trap.when.variables, *trap.when.unset):
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def interpreter(folder: Path, packages: Packages) -> Path:
    """A real interpreter that has these packages and no others."""
    site = folder / "site-packages"
    for name, version in packages.items():
        about = site / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
        (about / "METADATA").write_text(
            "\n".join([*lines, *(f"Requires-Dist: {line}" for line in REQUIRES.get(name, []))])
            + "\n"
        )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def trap_names(
    folder: Path,
    packages: Packages,
    settings: dict[str, str],
    variables: pytest.MonkeyPatch,
) -> set[str]:
    for name, value in settings.items():
        variables.setenv(name, value)
    return {trap.name for trap in active_traps(environment_facts(interpreter(folder, packages)))}


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_where_it_is(
    name: str,
    tmp_path: Path,
    variables: pytest.MonkeyPatch,
) -> None:
    assert name in trap_names(tmp_path, *CASES[name][0], variables)


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_found_where_it_is_not(
    name: str,
    tmp_path: Path,
    variables: pytest.MonkeyPatch,
) -> None:
    assert name not in trap_names(tmp_path, *CASES[name][1], variables)


def test_a_bare_interpreter_has_no_trap_of_packages(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    assert trap_names(tmp_path, {}, {}, variables) <= {"shared_memory_small"}


def test_small_shared_memory_is_told_with_its_size() -> None:
    small = EnvironmentFacts(packages={}, shm_bytes=64 * MIB)
    assert [trap.name for trap in active_traps(small)] == [
        "shared_memory_small"
    ] and "64 MiB" in active_traps(small)[0].says
    assert not active_traps(
        EnvironmentFacts(packages={}, shm_bytes=16 * 1024 * MIB)
    ) and not active_traps(EnvironmentFacts(packages={}))


def test_what_is_said_names_the_versions(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    traps = active_traps(
        environment_facts(
            interpreter(tmp_path, {"trl": "1.16.0", "vllm": "0.33.0", "ms_swift": "4.6.0"})
        )
    )
    says = " ".join(trap.says for trap in traps)
    assert "TRL 1.16.0 is made for vllm <=0.31.0,>=0.22.0, and vllm is 0.33.0" in says
    assert "ms-swift 4.6.0 requires trl<1.0,>=0.15, and 1.16.0 is installed" in says


def test_each_trap_has_its_sources_and_its_tests() -> None:
    names = [trap.name for trap in traps()]
    assert len(names) == len(set(names)) >= 15
    assert set(names) == {*CASES, "shared_memory_small"}
    assert all(
        trap.sources and all(re.fullmatch(r"https://\S+", source) for source in trap.sources)
        for trap in traps()
    )
